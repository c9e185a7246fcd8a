// The largest of a warp's integers.
#pragma once

#include "base/cuda/device.cuh"

namespace tradewind::cuda {

// In every lane.
template <class Integer>
__device__ __forceinline__ Integer max_of_warp(Integer value) {
  for (int width = kWarpThreads / 2; width > 0; width /= 2) {
    const Integer other = __shfl_xor_sync(kWholeWarp, value, width);
    value = value > other ? value : other;
  }
  return value;
}

}  // namespace tradewind::cuda
