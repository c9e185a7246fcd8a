// Lion, "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023, arXiv:2302.06675,
// algorithm 2): the sign of an interpolated momentum, decoupled weight decay.
#pragma once

#include "step/rule.h"

namespace tradewind {

struct LionRule {
  static constexpr const char* kName = "lion";
  static constexpr Needs kNeeds = Needs::kElement;
  static constexpr const char* kOptionNames[] = {"lr", "beta1", "beta2", "weight_decay"};
  static constexpr int kNumStates = 1;
  static constexpr const char* kStateNames[] = {"exp_avg"};
  static constexpr bool kStateIsPositive[] = {false};
  static constexpr bool kCountsSteps = false;

  struct Options {
    double lr, beta1, beta2, weight_decay;
  };

  template <class T>
  struct Scalars {
    T keep, lr, beta1, one_minus_beta1, beta2, one_minus_beta2;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t /*step*/,
                                           bool /*is_first*/) {
    return {static_cast<T>(1.0 - options.lr * options.weight_decay),
            static_cast<T>(options.lr),
            static_cast<T>(options.beta1),
            static_cast<T>(1.0 - options.beta1),
            static_cast<T>(options.beta2),
            static_cast<T>(1.0 - options.beta2)};
  }

  template <class T>
  TRADEWIND_RULE static void apply(const Scalars<T>& s, T gradient, T& parameter,
                                   T (&states)[kNumStates]) {
    const T mixed = states[0] * s.beta1 + gradient * s.one_minus_beta1;
    // Zero stays zero, and NaN stays NaN.
    const T sign = mixed > T(0) ? T(1) : (mixed < T(0) ? T(-1) : mixed);
    parameter = parameter * s.keep - s.lr * sign;
    states[0] = states[0] * s.beta2 + gradient * s.one_minus_beta2;
  }
};

}  // namespace tradewind
