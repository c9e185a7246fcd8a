// The step over a table of parameters: measure all gradients, combine the norm, sweep. The table
// and everything it points to belong to the caller and must outlive the call. Call from the thread
// that owns the Parallel. Objects keep their scratch memory, so a steady step allocates nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/parallel.h"
#include "step/kernels.h"

namespace tradewind {

// One parameter of a step. Arrays are contiguous and in one order of elements.
struct SweepSlot {
  DType dtype = DType::kFloat32;  // the parameter's, a floating one
  DType gradient_dtype = DType::kFloat32;
  Master master = Master::kNone;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* master_data = nullptr;
  void* states[kMaxStates] = {};
  Format state_formats[kMaxStates] = {};
  std::uint8_t* exponents[kMaxStates] = {};  // of 8-bit states, one for each exponent block
  std::int64_t num_elements = 0;
  int rule_idx = 0;
  double sign = 1.0;             // -1 maximizes
  std::int64_t scalars_idx = 0;  // into the scalars given to the sweep
  std::uint32_t random_key = 0;
  double matrix_scale = 1.0;  // Needs::kMatrix: what its direction is multiplied by
};

struct SlotMeasure {
  double sum_of_squares = 0.0;
  double max_abs = 0.0;
  std::int64_t num_zeros = 0;
};

// The measure of one set of gradients, as they lie in memory (not unscaled).
class Measure {
 public:
  // Starts anew for these slots. A slot's blocks are then either given (`adopt`, measured while the
  // gradient was hot) or computed by run().
  void begin(std::span<const SweepSlot> slots);
  void adopt(std::int64_t slot_idx, std::span<const BlockMeasure> blocks);
  // Computes what was not adopted, then combines, in lanes (lanes.h): blocks within each parameter,
  // then parameters. Not a bit depends on threads, ISA or on what was adopted.
  void run(const Kernels& kernels, const Parallel& parallel);

  [[nodiscard]] double sum_of_squares() const { return sum_of_squares_; }
  [[nodiscard]] double norm() const;
  [[nodiscard]] std::span<const SlotMeasure> slots() const { return slot_measures_; }
  // Elements that are NaN or infinite, and the first slot that has one (-1: none).
  [[nodiscard]] std::int64_t num_nonfinite() const { return num_nonfinite_; }
  [[nodiscard]] std::int64_t first_nonfinite_slot() const { return first_nonfinite_slot_; }

 private:
  void combine();
  void count_nonfinite(const Kernels& kernels);

  std::span<const SweepSlot> slots_;
  std::vector<std::int64_t> first_block_;  // per slot, and the total at the end
  std::vector<BlockMeasure> blocks_;
  std::vector<bool> is_adopted_;
  std::vector<SlotMeasure> slot_measures_;
  double sum_of_squares_ = 0.0;
  std::int64_t num_nonfinite_ = 0;
  std::int64_t first_nonfinite_slot_ = -1;
};

// What torch.nn.utils.clip_grad_norm_ multiplies by: max_norm / (norm + 1e-6), at most 1; NaN stays
// NaN.
double clip_factor(double norm, double max_norm);

// How far one sweep moved a parameter: sums of squares before the update, and of the change.
struct SlotChange {
  double parameter_squares = 0.0;
  double change_squares = 0.0;
};

// Orthogonalizes, in place, the direction of the slot: num_elements of float32, or of float64 for a
// float64 parameter.
using MatrixTransform = std::function<void(std::int64_t slot_idx, void* direction)>;

class Sweep {
 public:
  struct Options {
    double gradient_multiplier = 1.0;
    bool wants_changes = false;
    const MatrixTransform* transform = nullptr;  // needed where a rule Needs::kMatrix
  };

  // Updates every slot in place. `scalars` holds one block for each scalars_idx.
  void run(std::span<const SweepSlot> slots, std::span<const ScalarBlock> scalars,
           const Options& options, const Kernels& kernels, const Parallel& parallel);

  // Per slot, of the last run with wants_changes. Of a rule with norms: the change before its
  // scale.
  [[nodiscard]] std::span<const SlotChange> changes() const { return slot_changes_; }

 private:
  struct Call;
  void run_phase(const Call& call, Phase phase, Needs needs);
  void run_matrices(const Call& call, const Parallel& parallel);
  void combine_changes(std::span<const SweepSlot> slots);
  void compute_scales(std::span<const SweepSlot> slots);

  std::vector<std::int64_t> first_block_;
  std::vector<BlockChange> block_changes_;
  std::vector<SlotChange> slot_changes_;
  std::vector<double> scales_;  // per slot: what finish multiplies by
  std::vector<double> direction_;
};

}  // namespace tradewind
