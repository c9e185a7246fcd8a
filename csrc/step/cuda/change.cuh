// How far a sweep moves a norm block: squares go through shared memory, so that one warp adds them
// in the CPU's order, element i in lane i mod 32, in the precision of the arithmetic.
#pragma once

#include "step/cuda/column.cuh"
#include "step/cuda/exponents.cuh"
#include "step/cuda/interface.h"

namespace tradewind::cuda {

template <class T>
class ChangeSums {
 public:
  static constexpr int kSharedBytes = 2 * kPassElements * static_cast<int>(sizeof(T));

  // `shared`: kSharedBytes of the block's shared memory.
  __device__ __forceinline__ explicit ChangeSums(void* shared)
      : parameter_squares_(static_cast<T*>(shared)),
        change_squares_(parameter_squares_ + kPassElements) {}

  // Called by all threads of the block. change(i): of element i of this thread's piece.
  template <class Change>
  __device__ __forceinline__ void add(const Piece& piece, const T (&before)[kThreadElements],
                                      const Change& change) {
    const int place = static_cast<int>(threadIdx.x) * kThreadElements;
    TRADEWIND_UNROLL
    for (int i = 0; i < kThreadElements; ++i) {
      // Adding a zero beyond the end changes no bit of a sum of squares.
      const bool is_here = i < piece.count;
      const T moved = is_here ? change(i) : T(0);
      parameter_squares_[place + i] = is_here ? before[i] * before[i] : T(0);
      change_squares_[place + i] = moved * moved;
    }
    __syncthreads();
    // Warp 0 adds the first kind, warp 1 the second.
    if (warp_of_thread() < 2) {
      const T* squares = warp_of_thread() == 0 ? parameter_squares_ : change_squares_;
      for (int row = 0; row < kPassElements; row += kLanes) sum_ += squares[row + lane_of_thread()];
    }
    __syncthreads();
  }

  __device__ __forceinline__ void write(TradewindCudaChange* out) const {
    if (warp_of_thread() >= 2) return;
    const T sum = halve_warp(sum_);
    if (lane_of_thread() != 0) return;
    double* target = warp_of_thread() == 0 ? &out->parameter_squares : &out->change_squares;
    store_global(target, static_cast<double>(sum));
  }

 private:
  T* parameter_squares_;
  T* change_squares_;
  T sum_ = T(0);
};

}  // namespace tradewind::cuda
