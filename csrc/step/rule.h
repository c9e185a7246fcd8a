// What an update rule is: a struct of static members, written once and compiled for every ISA, for
// CUDA and for the scalar oracle. docs/add-an-update-rule.md adds one. A rule has
//   kName                 its name in the bindings
//   kNeeds                what an element's update depends on, see Needs
//   kOptionNames          the members of Options, in order: what one param group sets
//   kStateNames           one optimizer state per entry, each of the parameter's shape
//   kStateIsPositive      per state, whether it is never negative: 8-bit storage then has no sign
//   kCountsSteps          whether torch keeps a "step" in this rule's state
//   Options               doubles only
//   Scalars<T>            what one parameter needs in the inner loop, trivially copyable
//   scalars<T>(options, step, is_first)   step counts from 1; is_first: the states are all zero
// and the functions that its Needs asks for. They use IEEE + - * / and root only, and each is a
// TRADEWIND_RULE, see base/always_inline.h.
#pragma once

#include <cstdint>

#include "base/always_inline.h"

namespace tradewind {

enum class Needs : std::uint8_t {
  // Itself alone: apply(scalars, gradient, parameter, states) updates parameter and states.
  kElement,
  // Two norms of its parameter. advance(scalars, gradient, parameter, states) updates the states;
  // direction(scalars, parameter, states) is the update before scaling, and
  // finish(scalars, scale, direction, parameter) applies it, where scale is
  // scale(norm of the parameter, norm of the direction). Sharded, it takes one small all-reduce.
  kNorms,
  // The whole matrix: advance(...) updates the states and returns the direction, which the engine
  // orthogonalizes; finish() as above, with scale 1. Shards must be whole parameters.
  kMatrix,
};

inline constexpr int kMaxStates = 3;
inline constexpr int kMaxOptions = 8;

TRADEWIND_RULE float root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

TRADEWIND_RULE double root(double value) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(value);
#else
  return __builtin_sqrt(value);
#endif
}

// base^exponent by square-and-multiply: the same bits everywhere, unlike the library's pow.
TRADEWIND_RULE double power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace tradewind
