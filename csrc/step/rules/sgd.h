// Stochastic gradient descent with momentum (Polyak 1964), dampening and Nesterov's variant
// (Sutskever et al., 2013), weight decay added to the gradient, as torch.optim.SGD defines it.
#pragma once

#include "step/rule.h"

namespace tradewind {

template <bool kMomentum>
struct SgdRule {
  static constexpr const char* kName = kMomentum ? "sgd_momentum" : "sgd";
  static constexpr Needs kNeeds = Needs::kElement;
  static constexpr const char* kOptionNames[] = {"lr", "momentum", "dampening", "weight_decay",
                                                 "nesterov"};
  static constexpr int kNumStates = kMomentum ? 1 : 0;
  static constexpr const char* kStateNames[] = {"momentum_buffer"};
  static constexpr bool kStateIsPositive[] = {false};
  static constexpr bool kCountsSteps = false;

  struct Options {
    double lr, momentum, dampening, weight_decay, nesterov;
  };

  template <class T>
  struct Scalars {
    T lr, weight_decay, keep, take, momentum;
    bool decays, nesterov;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t /*step*/,
                                           bool is_first) {
    // The first buffer is the gradient itself, undampened: 0 * 0 + 1 * gradient.
    return {static_cast<T>(options.lr),
            static_cast<T>(options.weight_decay),
            static_cast<T>(is_first ? 0.0 : options.momentum),
            static_cast<T>(is_first ? 1.0 : 1.0 - options.dampening),
            static_cast<T>(options.momentum),
            options.weight_decay != 0.0,
            options.nesterov != 0.0};
  }

  template <class T>
  TRADEWIND_RULE static void apply(const Scalars<T>& s, T gradient, T& parameter,
                                   T (&states)[kNumStates == 0 ? 1 : kNumStates]) {
    if (s.decays) gradient = gradient + s.weight_decay * parameter;
    if constexpr (kMomentum) {
      states[0] = states[0] * s.keep + gradient * s.take;
      gradient = s.nesterov ? gradient + s.momentum * states[0] : states[0];
    }
    parameter = parameter - s.lr * gradient;
  }
};

}  // namespace tradewind
