/* The C interface of libtradewind_cuda: raw pointers, sizes, a stream, an error code. The library
 * links the static CUDA runtime, needs no libcuda to load, and is opened only where a GPU answers
 * (library.cpp). All device pointers belong to the caller and stay valid until the stream has
 * passed the call. Every function returns 0 or a cudaError_t. */
#ifndef TRADEWIND_STEP_CUDA_INTERFACE_H
#define TRADEWIND_STEP_CUDA_INTERFACE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of this file: a library of another version is refused. */
#define TRADEWIND_CUDA_INTERFACE_VERSION 1
/* Tensors that one launch takes: their descriptors travel as kernel arguments (4 KiB at most). */
#define TRADEWIND_CUDA_MAX_TENSORS 48

/* float32; pointers on one device, aligned to their elements, not overlapping. */
typedef struct {
  float* parameter;
  const float* gradient;
  float* states[3];
  int64_t num_elements;
} TradewindCudaTensor;

int tradewind_cuda_interface_version(void);

/* Devices that answer. 35 (cudaErrorInsufficientDriver) and 100 (cudaErrorNoDevice): no GPU here.
 */
int tradewind_cuda_probe(int* num_devices, int* compute_capability);

/* AdamW, with AMSGrad where `amsgrad` is not 0, over up to TRADEWIND_CUDA_MAX_TENSORS tensors in
 * one launch. `scalars`: AdamWRule::Scalars<float>. Gradients are multiplied by `multiplier`, and
 * by *device_multiplier where that is not null. */
int tradewind_cuda_adamw(const TradewindCudaTensor* tensors, int num_tensors, const void* scalars,
                         int amsgrad, float multiplier, const float* device_multiplier,
                         void* stream);

const char* tradewind_cuda_error_text(int code);

#ifdef __cplusplus
}
#endif

#endif
