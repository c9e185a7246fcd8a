// The order of sums, part of the norm's contract: number i goes to lane i mod 32, each lane adds in
// order, and lanes are halved five times. The same on the CPU, on CUDA (a lane is a thread of a
// warp) and for any number of threads.
#pragma once

#include <cstdint>

#include "base/always_inline.h"

namespace tradewind {

inline constexpr int kLanes = 32;

template <class T>
TRADEWIND_RULE T halve_lanes(T (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// number(i) for i in [0, count), in float64.
template <class Number>
TRADEWIND_RULE double sum_in_lanes(std::int64_t count, const Number& number) {
  double lanes[kLanes] = {};
  for (std::int64_t i = 0; i < count; ++i) lanes[i % kLanes] += number(i);
  return halve_lanes(lanes);
}

}  // namespace tradewind
