// Adam (Kingma and Ba, 2015), with weight decay added to the gradient or decoupled from it (AdamW:
// Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), optionally AMSGrad (Reddi,
// Kale and Kumar, 2018), as torch.optim.Adam and AdamW define them.
#pragma once

#include "step/rule.h"

namespace tradewind {

template <bool kDecoupled, bool kAmsgrad>
struct AdamRule {
  static constexpr const char* kName =
      kDecoupled ? (kAmsgrad ? "adamw_amsgrad" : "adamw") : (kAmsgrad ? "adam_amsgrad" : "adam");
  static constexpr Needs kNeeds = Needs::kElement;
  static constexpr const char* kOptionNames[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
  static constexpr int kNumStates = kAmsgrad ? 3 : 2;
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr bool kStateIsPositive[] = {false, true, true};
  static constexpr bool kCountsSteps = true;

  struct Options {
    double lr, beta1, beta2, eps, weight_decay;
  };

  template <class T>
  struct Scalars {
    T keep;   // decoupled: 1 - lr * weight decay
    T decay;  // coupled: weight decay
    T beta1, one_minus_beta1, beta2, one_minus_beta2;
    T inverse_root_bias2;  // 1 / sqrt(1 - beta2^t)
    T eps, step_size;      // step size: lr / (1 - beta1^t)
    bool decays;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t step,
                                           bool /*is_first*/) {
    const double bias1 = 1.0 - power(options.beta1, step);
    const double bias2 = 1.0 - power(options.beta2, step);
    return {static_cast<T>(1.0 - options.lr * options.weight_decay),
            static_cast<T>(options.weight_decay),
            static_cast<T>(options.beta1),
            static_cast<T>(1.0 - options.beta1),
            static_cast<T>(options.beta2),
            static_cast<T>(1.0 - options.beta2),
            static_cast<T>(1.0 / root(bias2)),
            static_cast<T>(options.eps),
            static_cast<T>(options.lr / bias1),
            options.weight_decay != 0.0};
  }

  template <class T>
  TRADEWIND_RULE static void apply(const Scalars<T>& s, T gradient, T& parameter,
                                   T (&states)[kNumStates]) {
    if constexpr (!kDecoupled) {
      if (s.decays) gradient = gradient + s.decay * parameter;
    }
    T& average = states[0];
    T& square = states[1];
    average = average * s.beta1 + gradient * s.one_minus_beta1;
    square = square * s.beta2 + gradient * gradient * s.one_minus_beta2;
    T second = square;
    if constexpr (kAmsgrad) {
      // Written so that a NaN second moment stays NaN, as torch.maximum keeps it.
      states[2] = states[2] > second ? states[2] : second;
      second = states[2];
    }
    const T denominator = root(second) * s.inverse_root_bias2 + s.eps;
    if constexpr (kDecoupled) parameter = parameter * s.keep;
    parameter = parameter - s.step_size * (average / denominator);
  }
};

}  // namespace tradewind
