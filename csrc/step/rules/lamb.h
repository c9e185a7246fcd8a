// LAMB, "Large Batch Optimization for Deep Learning" (You et al., 2020, arXiv:1904.00962, algorithm
// 2): Adam's direction plus decay, scaled per parameter by the ratio of the parameter's norm to the
// direction's; 1 where either is zero.
#pragma once

#include "step/rule.h"

namespace tradewind {

struct LambRule {
  static constexpr const char* kName = "lamb";
  static constexpr Needs kNeeds = Needs::kNorms;
  static constexpr const char* kOptionNames[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
  static constexpr int kNumStates = 2;
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq"};
  static constexpr bool kStateIsPositive[] = {false, true};
  static constexpr bool kCountsSteps = true;

  struct Options {
    double lr, beta1, beta2, eps, weight_decay;
  };

  template <class T>
  struct Scalars {
    T beta1, one_minus_beta1, beta2, one_minus_beta2;
    T inverse_bias1, inverse_root_bias2, eps, weight_decay, lr;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t step,
                                           bool /*is_first*/) {
    return {static_cast<T>(options.beta1),
            static_cast<T>(1.0 - options.beta1),
            static_cast<T>(options.beta2),
            static_cast<T>(1.0 - options.beta2),
            static_cast<T>(1.0 / (1.0 - power(options.beta1, step))),
            static_cast<T>(1.0 / root(1.0 - power(options.beta2, step))),
            static_cast<T>(options.eps),
            static_cast<T>(options.weight_decay),
            static_cast<T>(options.lr)};
  }

  template <class T>
  TRADEWIND_RULE static void advance(const Scalars<T>& s, T gradient, T /*parameter*/,
                                     T (&states)[kNumStates]) {
    states[0] = states[0] * s.beta1 + gradient * s.one_minus_beta1;
    states[1] = states[1] * s.beta2 + gradient * gradient * s.one_minus_beta2;
  }

  template <class T>
  TRADEWIND_RULE static T direction(const Scalars<T>& s, T parameter,
                                    const T (&states)[kNumStates]) {
    const T denominator = root(states[1]) * s.inverse_root_bias2 + s.eps;
    return states[0] * s.inverse_bias1 / denominator + s.weight_decay * parameter;
  }

  TRADEWIND_RULE static double scale(double parameter_norm, double direction_norm) {
    return parameter_norm > 0.0 && direction_norm > 0.0 ? parameter_norm / direction_norm : 1.0;
  }

  template <class T>
  TRADEWIND_RULE static void finish(const Scalars<T>& s, T scale, T direction, T& parameter) {
    parameter = parameter - s.lr * scale * direction;
  }
};

}  // namespace tradewind
