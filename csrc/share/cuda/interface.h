/* The C interface of libtradewind_cuda for sharing: what turns a rank's values into wire bytes and
 * back, and sums in rank order, over device memory. Every function queues one kernel on `stream`;
 * none allocates, synchronises or reads device memory on the host, so all may be captured in a CUDA
 * graph. All memory belongs to the caller and stays valid until the stream has passed the call.
 * Functions return 0 or a cudaError_t. docs/numbers.md: the same bits as on the CPU. */
#ifndef TRADEWIND_SHARE_CUDA_INTERFACE_H
#define TRADEWIND_SHARE_CUDA_INTERFACE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of this file: a library of another version is refused. */
#define TRADEWIND_CUDA_SHARE_VERSION 1

/* A run of values. Pointers to them need only their element's alignment, 16 bytes are faster; wires
 * that of 4 bytes (none without a codec). A codec that does not take the dtype is answered with
 * cudaErrorInvalidValue (1), as are encode and decode without a codec. */
typedef struct {
  int64_t num_elements;
  int32_t codec; /* share/codec.h's Codec */
  int32_t dtype; /* arena/dtype.h's DType */
} TradewindCudaRun;

/* One rank's part of a sum: wire bytes, or this rank's own values as they are. */
typedef struct {
  const void* data;
  int32_t is_values;
} TradewindCudaPart;

int tradewind_cuda_share_version(void);

/* As EncodeKernel and DecodeKernel of share/kernels.h: `error` may be null. */
int tradewind_cuda_encode(const TradewindCudaRun* run, const void* values, float* error, void* wire,
                          void* stream);
int tradewind_cuda_decode(const TradewindCudaRun* run, const void* wire, void* values,
                          void* stream);

/* As SumKernel: `parts` lie in device memory, and `values` may be one of them. */
int tradewind_cuda_sum(const TradewindCudaRun* run, const TradewindCudaPart* parts,
                       int64_t num_parts, double divisor, void* values, void* stream);

#ifdef __cplusplus
}
#endif

#endif
