// Stands in for CUDA's header of this name where the tests compile kernels for the host: the subset
// that the kernels under csrc use.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda_emulation/grid.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct GridIndex {
  unsigned x, y, z;
};
extern GridIndex threadIdx, blockIdx, blockDim, gridDim;

enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

inline void __syncthreads() { cuda_emulation::sync_block(); }

template <class T>
T cuda_emulation_shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = cuda_emulation::exchange(mask, cuda_emulation::WarpOperation::kShuffle, bits, source);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  const unsigned lane = threadIdx.x % cuda_emulation::kWarpThreads;
  return cuda_emulation_shuffle(mask, value, lane ^ static_cast<unsigned>(lane_mask));
}

// Lanes beyond the end keep their own value.
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % cuda_emulation::kWarpThreads;
  const unsigned source = lane + distance;
  return cuda_emulation_shuffle(mask, value, source < cuda_emulation::kWarpThreads ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
  return cuda_emulation::ballot(mask, vote != 0);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
