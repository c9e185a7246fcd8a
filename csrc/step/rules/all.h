// Every rule of the engine. A new rule is its own header and one line here.
#pragma once

#include "step/rules/adamw.h"
#include "step/rules/sgd.h"

namespace tradewind {

template <class... Rules>
struct RuleList {
  static constexpr int kSize = sizeof...(Rules);
};

using AllRules = RuleList<AdamWRule<false>, AdamWRule<true>, SgdRule<false>, SgdRule<true>>;
inline constexpr int kNumRules = AllRules::kSize;

}  // namespace tradewind
