// Adagrad (Duchi, Hazan and Singer, 2011) as torch.optim.Adagrad defines it: lr decays with
// 1 / (1 + (t - 1) * lr_decay), weight decay is added to the gradient.
#pragma once

#include "step/rule.h"

namespace tradewind {

struct AdagradRule {
  static constexpr const char* kName = "adagrad";
  static constexpr Needs kNeeds = Needs::kElement;
  static constexpr const char* kOptionNames[] = {"lr", "lr_decay", "weight_decay", "eps"};
  static constexpr int kNumStates = 1;
  static constexpr const char* kStateNames[] = {"sum"};
  static constexpr bool kStateIsPositive[] = {true};
  static constexpr bool kCountsSteps = true;

  struct Options {
    double lr, lr_decay, weight_decay, eps;
  };

  template <class T>
  struct Scalars {
    T decay, eps, step_size;
    bool decays;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t step,
                                           bool /*is_first*/) {
    const double slowed = 1.0 + static_cast<double>(step - 1) * options.lr_decay;
    return {static_cast<T>(options.weight_decay), static_cast<T>(options.eps),
            static_cast<T>(options.lr / slowed), options.weight_decay != 0.0};
  }

  template <class T>
  TRADEWIND_RULE static void apply(const Scalars<T>& s, T gradient, T& parameter,
                                   T (&states)[kNumStates]) {
    if (s.decays) gradient = gradient + s.decay * parameter;
    states[0] = states[0] + gradient * gradient;
    parameter = parameter - s.step_size * (gradient / (root(states[0]) + s.eps));
  }
};

}  // namespace tradewind
