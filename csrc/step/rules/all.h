// Every rule of the engine. A new rule is its own header and one line here.
#pragma once

#include "step/rules/adagrad.h"
#include "step/rules/adam.h"
#include "step/rules/lamb.h"
#include "step/rules/lion.h"
#include "step/rules/muon.h"
#include "step/rules/rmsprop.h"
#include "step/rules/sgd.h"

namespace tradewind {

template <class... Rules>
struct RuleList {
  static constexpr int kSize = sizeof...(Rules);
};

using AllRules = RuleList<AdamRule<true, false>, AdamRule<true, true>, AdamRule<false, false>,
                          AdamRule<false, true>, SgdRule<false>, SgdRule<true>, LionRule, LambRule,
                          AdagradRule, RmspropRule<false, false>, RmspropRule<false, true>,
                          RmspropRule<true, false>, RmspropRule<true, true>, MuonRule>;
inline constexpr int kNumRules = AllRules::kSize;

}  // namespace tradewind
