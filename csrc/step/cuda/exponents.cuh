// The largest magnitude of each exponent block that a block of threads works on: of two warps each,
// found through shared memory.
#pragma once

#include "step/cuda/column.cuh"
#include "step/cuda/warp.cuh"
#include "step/rule.h"

namespace tradewind::cuda {

inline constexpr int kSweepThreads = 256;
inline constexpr int kSweepWarps = kSweepThreads / kWarpThreads;
// What a block of threads takes at a time.
inline constexpr int kPassElements = kSweepThreads * kThreadElements;
inline constexpr int kExponentWarps = kExponentBlockElements / (kWarpThreads * kThreadElements);
static_assert(kExponentWarps == 2);

class BlockMaxima {
 public:
  // Two sets, for even and odd passes: one sync a pass is enough.
  static constexpr int kSetInts = kMaxStates * kSweepWarps;
  static constexpr int kSharedBytes = 2 * kSetInts * static_cast<int>(sizeof(std::int32_t));

  // `shared`: kSharedBytes of the block's shared memory.
  __device__ __forceinline__ explicit BlockMaxima(void* shared)
      : maxima_(static_cast<std::int32_t*>(shared)) {}

  // Called by whole warps.
  template <class T>
  __device__ __forceinline__ void add(int pass, int state, const Piece& piece,
                                      const T (&values)[kThreadElements]) {
    std::int32_t largest = 0;
    TRADEWIND_UNROLL
    for (int i = 0; i < kThreadElements; ++i) {
      const std::int32_t bits = i < piece.count ? magnitude_bits(static_cast<float>(values[i])) : 0;
      largest = largest > bits ? largest : bits;
    }
    largest = max_of_warp(largest);
    if (lane_of_thread() == 0) set_of(pass, state)[warp_of_thread()] = largest;
  }

  // After __syncthreads().
  [[nodiscard]] __device__ __forceinline__ std::uint32_t largest(int pass, int state) const {
    const std::int32_t* pair =
        set_of(pass, state) + warp_of_thread() / kExponentWarps * kExponentWarps;
    return static_cast<std::uint32_t>(pair[0] > pair[1] ? pair[0] : pair[1]);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::int32_t* set_of(int pass, int state) const {
    return maxima_ + pass % 2 * kSetInts + state * kSweepWarps;
  }

  std::int32_t* maxima_;
};

}  // namespace tradewind::cuda
