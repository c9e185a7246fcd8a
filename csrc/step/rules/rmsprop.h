// RMSprop (Tieleman and Hinton, 2012), optionally centered (Graves, 2013, arXiv:1308.0850) and with
// momentum, as torch.optim.RMSprop defines it: weight decay is added to the gradient.
#pragma once

#include "step/rule.h"

namespace tradewind {

template <bool kCentered, bool kMomentum>
struct RmspropRule {
  static constexpr const char* kName =
      kCentered ? (kMomentum ? "rmsprop_centered_momentum" : "rmsprop_centered")
                : (kMomentum ? "rmsprop_momentum" : "rmsprop");
  static constexpr Needs kNeeds = Needs::kElement;
  static constexpr const char* kOptionNames[] = {"lr", "alpha", "eps", "weight_decay", "momentum"};
  static constexpr int kNumStates = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);
  static constexpr const char* kStateNames[] = {
      "square_avg", kCentered ? "grad_avg" : "momentum_buffer", "momentum_buffer"};
  static constexpr bool kStateIsPositive[] = {true, false, false};
  static constexpr bool kCountsSteps = true;

  struct Options {
    double lr, alpha, eps, weight_decay, momentum;
  };

  template <class T>
  struct Scalars {
    T decay, alpha, one_minus_alpha, eps, momentum, lr;
    bool decays;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t /*step*/,
                                           bool /*is_first*/) {
    return {static_cast<T>(options.weight_decay), static_cast<T>(options.alpha),
            static_cast<T>(1.0 - options.alpha),  static_cast<T>(options.eps),
            static_cast<T>(options.momentum),     static_cast<T>(options.lr),
            options.weight_decay != 0.0};
  }

  template <class T>
  TRADEWIND_RULE static void apply(const Scalars<T>& s, T gradient, T& parameter,
                                   T (&states)[kNumStates]) {
    if (s.decays) gradient = gradient + s.decay * parameter;
    states[0] = states[0] * s.alpha + gradient * gradient * s.one_minus_alpha;
    T second = states[0];
    if constexpr (kCentered) {
      states[1] = states[1] * s.alpha + gradient * s.one_minus_alpha;
      second = second - states[1] * states[1];
    }
    T step = gradient / (root(second) + s.eps);
    if constexpr (kMomentum) {
      T& buffer = states[kNumStates - 1];
      buffer = buffer * s.momentum + step;
      step = buffer;
    }
    parameter = parameter - s.lr * step;
  }
};

}  // namespace tradewind
