// What an update rule is: a struct of static members, written once and compiled for every ISA, for
// CUDA and for the scalar oracle. See rules/adamw.h for the pattern and CONTRIBUTING.md for the
// recipe. A rule has
//   kName                 its name in the bindings
//   kOptionNames          the members of Options, in order: what one param group sets
//   kStateNames           one optimizer state per entry, each of the parameter's shape and dtype
//   kCountsSteps          whether torch keeps a "step" in this rule's state
//   Options               doubles only
//   Scalars<T>            what one parameter needs in the inner loop, trivially copyable
//   scalars<T>(options, step, is_first)   step counts from 1; is_first: the states are all zero
//   apply(scalars, gradient, parameter, states)   one element; IEEE + - * / and root only
// apply() must be always_inline: an out-of-line copy compiled for one ISA could be linked into
// another's kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TRADEWIND_RULE __host__ __device__ __forceinline__
#else
#define TRADEWIND_RULE inline __attribute__((always_inline))
#endif

namespace tradewind {

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
inline double power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace tradewind
