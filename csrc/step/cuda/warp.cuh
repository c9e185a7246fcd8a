// Sums and maxima over a warp, in the order of step/lanes.h: this thread is one of its lanes.
#pragma once

#include "base/cuda/warp_max.cuh"
#include "step/lanes.h"

namespace tradewind::cuda {

static_assert(kWarpThreads == kLanes, "a lane of the sums is a thread of a warp");

// This lane's numbers of [0, count), in order: fetch(i) starts the load of number i, kInFlight of
// them before the first is used, and take(i, fetched) uses it.
template <int kInFlight, class Fetch, class Take>
__device__ __forceinline__ void visit_lane(std::int64_t count, const Fetch& fetch,
                                           const Take& take) {
  using Fetched = decltype(fetch(std::int64_t{0}));
  const int lane = lane_of_thread();
  constexpr int kStride = kInFlight * kLanes;
  std::int64_t first = 0;
  for (; first + kStride <= count; first += kStride) {
    Fetched fetched[kInFlight];
    TRADEWIND_UNROLL
    for (int i = 0; i < kInFlight; ++i) fetched[i] = fetch(first + i * kLanes + lane);
    TRADEWIND_UNROLL
    for (int i = 0; i < kInFlight; ++i) take(first + i * kLanes + lane, fetched[i]);
  }
  // The rest of it: a small tensor has nothing else.
  constexpr int kFewInFlight = kInFlight < 4 ? kInFlight : 4;
  for (; first < count; first += kFewInFlight * kLanes) {
    Fetched fetched[kFewInFlight] = {};
    TRADEWIND_UNROLL
    for (int i = 0; i < kFewInFlight; ++i) {
      const std::int64_t number = first + i * kLanes + lane;
      if (number < count) fetched[i] = fetch(number);
    }
    TRADEWIND_UNROLL
    for (int i = 0; i < kFewInFlight; ++i) {
      const std::int64_t number = first + i * kLanes + lane;
      if (number < count) take(number, fetched[i]);
    }
  }
}

// The whole sum, in lane 0; halve_lanes() of all lanes' sums.
template <class T>
__device__ __forceinline__ T halve_warp(T sum) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    sum += __shfl_down_sync(kWholeWarp, sum, static_cast<unsigned>(width));
  }
  return sum;
}

// Magnitudes as integers: in their order NaN comes after infinity, so one maximum finds both.
__device__ __forceinline__ std::int32_t magnitude_bits(float value) {
  return bit_cast<std::int32_t>(value) & 0x7FFFFFFF;
}
__device__ __forceinline__ std::int64_t magnitude_bits(double value) {
  return bit_cast<std::int64_t>(value) & 0x7FFFFFFFFFFFFFFF;
}
__device__ __forceinline__ double magnitude_of(std::int32_t bits) {
  return static_cast<double>(bit_cast<float>(bits));
}
__device__ __forceinline__ double magnitude_of(std::int64_t bits) { return bit_cast<double>(bits); }

__device__ __forceinline__ bool is_finite(double magnitude) {
  return magnitude_bits(magnitude) < 0x7FF0000000000000;
}

}  // namespace tradewind::cuda
