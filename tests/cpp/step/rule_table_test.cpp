#include "step/rule_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "base/error_matching.h"
#include "base/split_mix.h"
#include "step/oracle.h"
#include "step/rule_options.h"
#include "step/rules/adam.h"
#include "step/rules/all.h"

namespace tradewind {
namespace {

const RuleInfo& rule_named(std::string_view name) {
  return rules()[static_cast<std::size_t>(find_rule(name))];
}

using Names = std::vector<std::string_view>;
using AdamW = AdamRule<true, false>;

TEST(RuleTable, NamesDifferAndAreFound) {
  EXPECT_FALSE(rules().empty());
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < rules().size(); ++i) {
    EXPECT_EQ(find_rule(rules()[i].name), static_cast<int>(i));
    names.insert(rules()[i].name);
  }
  EXPECT_EQ(names.size(), rules().size());
}

struct Description {
  std::string_view name;
  Needs needs;
  Names options;
  Names states;
  std::vector<bool> is_positive;
  bool counts_steps;
};

// What torch names them, and what a rule's storage needs to know.
const std::vector<Description>& descriptions() {
  using enum Needs;
  static const Names kAdam{"lr", "beta1", "beta2", "eps", "weight_decay"};
  static const Names kSgd{"lr", "momentum", "dampening", "weight_decay", "nesterov"};
  static const Names kRmsprop{"lr", "alpha", "eps", "weight_decay", "momentum"};
  static const Names kMoments{"exp_avg", "exp_avg_sq"};
  static const Names kAmsgrad{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static const std::vector<Description> kAll{
      {"adamw", kElement, kAdam, kMoments, {false, true}, true},
      {"adamw_amsgrad", kElement, kAdam, kAmsgrad, {false, true, true}, true},
      {"adam", kElement, kAdam, kMoments, {false, true}, true},
      {"adam_amsgrad", kElement, kAdam, kAmsgrad, {false, true, true}, true},
      {"sgd", kElement, kSgd, {}, {}, false},
      {"sgd_momentum", kElement, kSgd, {"momentum_buffer"}, {false}, false},
      {"lion", kElement, {"lr", "beta1", "beta2", "weight_decay"}, {"exp_avg"}, {false}, false},
      {"lamb", kNorms, kAdam, kMoments, {false, true}, true},
      {"adagrad", kElement, {"lr", "lr_decay", "weight_decay", "eps"}, {"sum"}, {true}, true},
      {"rmsprop", kElement, kRmsprop, {"square_avg"}, {true}, true},
      {"rmsprop_momentum",
       kElement,
       kRmsprop,
       {"square_avg", "momentum_buffer"},
       {true, false},
       true},
      {"rmsprop_centered", kElement, kRmsprop, {"square_avg", "grad_avg"}, {true, false}, true},
      {"rmsprop_centered_momentum",
       kElement,
       kRmsprop,
       {"square_avg", "grad_avg", "momentum_buffer"},
       {true, false, false},
       true},
      {"muon",
       kMatrix,
       {"lr", "momentum", "nesterov", "weight_decay"},
       {"momentum_buffer"},
       {false},
       false},
  };
  return kAll;
}

TEST(RuleTable, DescribesEveryRule) {
  EXPECT_EQ(descriptions().size(), rules().size()) << "a new rule wants a line in descriptions()";
  for (const Description& expected : descriptions()) {
    const RuleInfo& rule = rule_named(expected.name);
    EXPECT_EQ(rule.needs, expected.needs) << rule.name;
    EXPECT_EQ(Names(rule.option_names.begin(), rule.option_names.end()), expected.options);
    EXPECT_EQ(Names(rule.state_names.begin(), rule.state_names.end()), expected.states);
    EXPECT_EQ(std::vector<bool>(rule.state_is_positive.begin(), rule.state_is_positive.end()),
              expected.is_positive)
        << rule.name;
    EXPECT_EQ(rule.counts_steps, expected.counts_steps) << rule.name;
    EXPECT_EQ(rule.scale != nullptr, expected.needs == Needs::kNorms) << rule.name;
  }
}

TEST(RuleTable, LambsScaleIsTheRatioOfNormsOrOne) {
  const auto scale = rule_named("lamb").scale;
  EXPECT_EQ(scale(3.0, 4.0), 0.75);
  EXPECT_EQ(scale(0.0, 4.0), 1.0);
  EXPECT_EQ(scale(3.0, 0.0), 1.0);
}

TEST(RuleTable, AnUnknownRuleIsRefusedWithTheKnownOnes) {
  for (const RuleInfo& rule : rules()) {
    expect_error(ErrorKind::kBadValue, {"'adamv'", std::string(rule.name)},
                 [] { find_rule("adamv"); });
  }
}

TEST(RuleTable, ScalarsOfAdamWAreTorchsByHand) {
  const std::vector<double> options{0.5, 0.25, 0.75, 1e-3, 0.125};
  AdamW::Scalars<double> scalars{};
  const ScalarBlock block = scalars_for(rule_named("adamw"), DType::kFloat64, options, 2, false);
  std::memcpy(&scalars, block.bytes, sizeof(scalars));
  EXPECT_EQ(scalars.keep, 1.0 - 0.5 * 0.125);
  EXPECT_EQ(scalars.one_minus_beta1, 0.75);
  EXPECT_EQ(scalars.one_minus_beta2, 0.25);
  EXPECT_EQ(scalars.step_size, 0.5 / (1.0 - 0.0625));
  EXPECT_EQ(scalars.inverse_root_bias2, 1.0 / std::sqrt(1.0 - 0.5625));
  EXPECT_EQ(scalars.eps, 1e-3);
}

TEST(RuleTable, FloatScalarsAreTheDoubleOnesRoundedOnce) {
  const std::vector<double> options = example_options(rule_named("adamw"), false);
  AdamW::Scalars<double> wide{};
  AdamW::Scalars<float> narrow{};
  const ScalarBlock of_double =
      scalars_for(rule_named("adamw"), DType::kFloat64, options, 9, false);
  const ScalarBlock of_float = scalars_for(rule_named("adamw"), DType::kFloat16, options, 9, false);
  std::memcpy(&wide, of_double.bytes, sizeof(wide));
  std::memcpy(&narrow, of_float.bytes, sizeof(narrow));
  EXPECT_EQ(narrow.keep, static_cast<float>(wide.keep));
  EXPECT_EQ(narrow.one_minus_beta2, static_cast<float>(wide.one_minus_beta2));
  EXPECT_EQ(narrow.inverse_root_bias2, static_cast<float>(wide.inverse_root_bias2));
  EXPECT_EQ(narrow.step_size, static_cast<float>(wide.step_size));
}

// An 8-bit state without a sign would lose it: no positive state may become negative.
TEST(RuleTable, PositiveStatesStayPositive) {
  for (const RuleInfo& rule : rules()) {
    SplitMix random(6);
    OracleArrays<float> arrays{std::vector<float>(500), std::vector<float>(500), {}};
    arrays.states.assign(rule.state_names.size(), std::vector<float>(500));
    for (std::int64_t step = 1; step <= 20; ++step) {
      for (float& gradient : arrays.gradient) gradient = static_cast<float>(random.uniform());
      oracle_step<float>(rule.name, example_options(rule, false), step, step == 1, 1.0F, arrays);
    }
    for (std::size_t s = 0; s < rule.state_names.size(); ++s) {
      const auto is_negative = [](float value) { return value < 0.0F; };
      EXPECT_EQ(std::ranges::none_of(arrays.states[s], is_negative), rule.state_is_positive[s])
          << rule.name << ": " << rule.state_names[s];
    }
  }
}

}  // namespace
}  // namespace tradewind
