/* The C interface of libtradewind_cuda: a step over a table of parameters in device memory. Every
 * function queues a fixed number of kernels on `stream`, whatever the number of tensors; none
 * allocates, synchronises or reads device memory on the host, so all may be captured in a CUDA
 * graph. All memory belongs to the caller and stays valid until the stream has passed the call.
 * Functions return 0 or a cudaError_t. docs/numbers.md: the same bits as on the CPU. */
#ifndef TRADEWIND_STEP_CUDA_INTERFACE_H
#define TRADEWIND_STEP_CUDA_INTERFACE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of this file: a library of another version is refused. */
#define TRADEWIND_CUDA_INTERFACE_VERSION 3

/* Equal to kNormBlockElements, kMaxStates, kMaxOptions and sizeof(ScalarBlock). */
#define TRADEWIND_CUDA_BLOCK_ELEMENTS 4096
#define TRADEWIND_CUDA_MAX_STATES 3
#define TRADEWIND_CUDA_MAX_OPTIONS 8
#define TRADEWIND_CUDA_SCALAR_BYTES 96

/* --- what the caller uploads ------------------------------------------------------------------ */

/* One parameter; pointers are to device memory, aligned to their elements, not overlapping. 16-byte
 * alignment is faster. Formats are step/format.h's numbers. */
typedef struct {
  void* parameter;
  void* gradient;
  void* master;                                  /* null where master_kind is 0 */
  void* states[TRADEWIND_CUDA_MAX_STATES];       /* as many as the rule has */
  uint8_t* exponents[TRADEWIND_CUDA_MAX_STATES]; /* of 8-bit states */
  void* direction;      /* Needs::kMatrix: num_elements of float32, or float64 by the arithmetic */
  float* step;          /* updates so far, advanced by control; null where neither rule nor random
                           rounding counts them */
  uint8_t* has_stepped; /* 0 until control lets the first update pass; null: is_first is false */
  int64_t num_elements;
  int64_t first_block;   /* norm blocks of all slots before this one */
  int64_t parameter_idx; /* of random_key() */
  double sign;           /* -1 maximizes */
  double matrix_scale;   /* Needs::kMatrix: what its direction is multiplied by */
  int32_t rule_idx;
  int32_t group_idx;
  uint8_t parameter_format; /* float64 makes the arithmetic float64 */
  uint8_t gradient_format;
  uint8_t master_kind; /* step/format.h's Master */
  uint8_t state_formats[TRADEWIND_CUDA_MAX_STATES];
} TradewindCudaSlot;

/* One param group: the members of its rule's Options, in order. */
typedef struct {
  double options[TRADEWIND_CUDA_MAX_OPTIONS];
  const void* lr; /* null, or a scalar in device memory that replaces options[0] */
  int32_t lr_is_double;
} TradewindCudaGroup;

/* The orders of a step. */
typedef struct {
  double gradient_multiplier; /* 1 / what accumulation divides by; loss scales divide it further */
  double max_norm;            /* of the unscaled gradients; negative: no clipping */
  uint64_t seed;              /* of random_key() */
  const float* grad_scale;    /* null, or a loss scale that is kept elsewhere */
  const float* found_inf;     /* null, or a veto from elsewhere: not 0 */
  double growth_factor;       /* the loss scale kept here, by torch.amp.GradScaler's rules */
  double backoff_factor;
  double min_loss_scale;
  int32_t growth_interval; /* 0: no loss scale is kept here */
  int32_t is_measured;     /* combine has run for these gradients */
  int32_t vetoes_nonfinite;
} TradewindCudaSettings;

/* --- what the device keeps -------------------------------------------------------------------- */

/* Kept from step to step: the caller writes it once (loss_scale to its initial value, the rest to
 * 0) and saves it with a checkpoint. */
typedef struct {
  int64_t num_steps; /* updates so far */
  int64_t num_skipped;
  float loss_scale; /* float32: losses may be multiplied by it where it lies */
  int32_t growth_tracker;
} TradewindCudaState;

/* Of the last step. The first two are sums over slots: a sharded step all-reduces them as two
 * doubles between combine and control. */
typedef struct {
  double sum_of_squares; /* of the gradients as they lie in memory */
  double num_nonfinite_slots;
  int64_t first_nonfinite_slot; /* -1: none here */
  double norm;                  /* of the unscaled gradients; 0 where not measured */
  double clip_factor;
  double gradient_multiplier; /* unscale and clip in one factor */
  float loss_scale;           /* that these gradients were divided by */
  int32_t vetoed;             /* nothing but this struct and the state has changed */
} TradewindCudaOutcome;

typedef struct {
  TradewindCudaSettings settings; /* first: uploaded without touching the rest */
  TradewindCudaState state;
  TradewindCudaOutcome outcome;
} TradewindCudaControl;

typedef struct {
  double sum_of_squares;
  double max_abs; /* NaN and infinity count as larger than any number */
  int64_t num_zeros;
} TradewindCudaMeasure; /* of a norm block (BlockMeasure) or a slot (SlotMeasure) */

typedef struct {
  double parameter_squares;
  double change_squares;
} TradewindCudaChange; /* of a norm block (BlockChange) or a slot (SlotChange) */

/* What control works out for a slot, for the sweeps. Scratch. */
typedef struct {
#ifdef __cplusplus
  alignas(16)
#else
  _Alignas(16)
#endif
      unsigned char scalars[TRADEWIND_CUDA_SCALAR_BYTES]; /* the rule's Scalars<T> */
  double gradient_multiplier;
  uint32_t random_key;
} TradewindCudaPlan;

/* --- calls ------------------------------------------------------------------------------------ */

/* The step's arrays, all in device memory; this struct itself is read by the call. */
typedef struct {
  const TradewindCudaSlot* slots;
  const int64_t* first_blocks; /* each slot's first_block, and num_blocks at the end */
  const TradewindCudaGroup* groups;
  TradewindCudaControl* control;
  TradewindCudaMeasure* block_measures; /* num_blocks */
  TradewindCudaMeasure* slot_measures;  /* num_slots */
  TradewindCudaPlan* plans;             /* num_slots */
  TradewindCudaChange* block_changes;   /* num_blocks; null where no call asks for changes */
  TradewindCudaChange* slot_changes;    /* num_slots; likewise */
  int64_t num_blocks;
  int32_t num_slots;
} TradewindCudaTable;

/* Some of the table's slots, in any order: those whose gradient has just arrived, or those of one
 * rule. Arrays are in device memory. Where a call takes a list, null means all slots. */
typedef struct {
  const int32_t* slot_idx;
  const int64_t* first_blocks; /* of num_norm_blocks() in list order, and num_blocks at the end */
  int64_t num_blocks;
  int32_t num_slots;
} TradewindCudaList;

/* A gradient of float32, bfloat16 or float16 for one entry of a list. */
typedef struct {
  const void* values;
  int32_t format;
} TradewindCudaSource;

enum { TRADEWIND_CUDA_UPDATE = 0, TRADEWIND_CUDA_FINISH = 1 }; /* Phase */

int tradewind_cuda_interface_version(void);
const char* tradewind_cuda_error_text(int code);

/* Devices that answer. 35 (cudaErrorInsufficientDriver) and 100 (cudaErrorNoDevice): no GPU. */
int tradewind_cuda_probe(int* num_devices, int* compute_capability);

/* Adds sources (one for each entry of the list, in device memory) to the slots' gradients, which
 * must be float32, or overwrites them; with `measures`, block_measures as tradewind_cuda_measure
 * would write them afterwards. One kernel. */
int tradewind_cuda_ingest(const TradewindCudaTable* table, const TradewindCudaList* list,
                          const TradewindCudaSource* sources, int overwrites, int measures,
                          void* stream);

/* block_measures of the listed slots' gradients. One kernel. */
int tradewind_cuda_measure(const TradewindCudaTable* table, const TradewindCudaList* list,
                           void* stream);

/* slot_measures from all block_measures, and the outcome's sums from those. Two kernels. */
int tradewind_cuda_combine(const TradewindCudaTable* table, void* stream);

/* Decides (norm, veto, clip factor, loss scale) and, unless vetoed, advances steps and works out
 * plans. Two kernels, once per step. */
int tradewind_cuda_control(const TradewindCudaTable* table, void* stream);

/* The given phase of the given rule, for those listed slots that are of this rule and of float64
 * arithmetic or not; others in the list are passed over. Nothing where vetoed. `wants_changes`:
 * writes block_changes; the update of a rule with Needs::kNorms needs it. One kernel. */
int tradewind_cuda_sweep(const TradewindCudaTable* table, const TradewindCudaList* list,
                         int rule_idx, int is_double, int phase, int wants_changes, void* stream);

/* slot_changes of the listed slots from their block_changes. A rule with Needs::kNorms takes its
 * scale from them when it finishes; a sharded step all-reduces them in between. One kernel. */
int tradewind_cuda_combine_changes(const TradewindCudaTable* table, const TradewindCudaList* list,
                                   void* stream);

#ifdef __cplusplus
}
#endif

#endif
