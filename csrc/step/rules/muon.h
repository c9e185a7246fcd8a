// Muon (Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) as
// torch.optim.Muon defines it: the momentum of a matrix is orthogonalized by Newton-Schulz
// iterations before it is applied; decoupled weight decay.
#pragma once

#include "step/rule.h"

namespace tradewind {

struct MuonRule {
  static constexpr const char* kName = "muon";
  static constexpr Needs kNeeds = Needs::kMatrix;
  static constexpr const char* kOptionNames[] = {"lr", "momentum", "nesterov", "weight_decay"};
  static constexpr int kNumStates = 1;
  static constexpr const char* kStateNames[] = {"momentum_buffer"};
  static constexpr bool kStateIsPositive[] = {false};
  static constexpr bool kCountsSteps = false;

  struct Options {
    double lr, momentum, nesterov, weight_decay;
  };

  template <class T>
  struct Scalars {
    T keep, momentum, one_minus_momentum, lr;
    bool nesterov;
  };

  template <class T>
  TRADEWIND_RULE static Scalars<T> scalars(const Options& options, std::int64_t /*step*/,
                                           bool /*is_first*/) {
    return {static_cast<T>(1.0 - options.lr * options.weight_decay),
            static_cast<T>(options.momentum), static_cast<T>(1.0 - options.momentum),
            static_cast<T>(options.lr), options.nesterov != 0.0};
  }

  template <class T>
  TRADEWIND_RULE static T advance(const Scalars<T>& s, T gradient, T /*parameter*/,
                                  T (&states)[kNumStates]) {
    states[0] = states[0] * s.momentum + gradient * s.one_minus_momentum;
    if (!s.nesterov) return states[0];
    return gradient * s.one_minus_momentum + states[0] * s.momentum;
  }

  // `scale` adjusts lr to the matrix's shape.
  template <class T>
  TRADEWIND_RULE static void finish(const Scalars<T>& s, T scale, T direction, T& parameter) {
    parameter = parameter * s.keep - s.lr * scale * direction;
  }
};

}  // namespace tradewind
