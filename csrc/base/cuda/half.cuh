// float16 by its bits: the device's conversions, or the compiler's where the tests compile this for
// the host. Both round to nearest even.
#pragma once

#include "base/cuda/device.cuh"
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace tradewind::cuda {

__device__ __forceinline__ float from_float16(std::uint16_t stored) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(stored));
#else
  return static_cast<float>(bit_cast<_Float16>(stored));
#endif
}

__device__ __forceinline__ std::uint16_t to_float16(float value) {
#if defined(__CUDACC__)
  return __half_as_ushort(__float2half_rn(value));
#else
  return bit_cast<std::uint16_t>(static_cast<_Float16>(value));
#endif
}

}  // namespace tradewind::cuda
