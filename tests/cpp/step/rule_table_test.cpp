#include "step/rule_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "base/error_matching.h"
#include "step/rule_options.h"
#include "step/rules/adamw.h"
#include "step/rules/all.h"

namespace tradewind {
namespace {

const RuleInfo& rule_named(std::string_view name) {
  return rules()[static_cast<std::size_t>(find_rule(name))];
}

using Names = std::vector<std::string_view>;

TEST(RuleTable, NamesDifferAndAreFound) {
  EXPECT_FALSE(rules().empty());
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < rules().size(); ++i) {
    EXPECT_EQ(find_rule(rules()[i].name), static_cast<int>(i));
    names.insert(rules()[i].name);
  }
  EXPECT_EQ(names.size(), rules().size());
}

TEST(RuleTable, DescribesAdamW) {
  const RuleInfo& plain = rule_named("adamw");
  EXPECT_EQ(Names(plain.option_names.begin(), plain.option_names.end()),
            (Names{"lr", "beta1", "beta2", "eps", "weight_decay"}));
  EXPECT_EQ(Names(plain.state_names.begin(), plain.state_names.end()),
            (Names{"exp_avg", "exp_avg_sq"}));
  EXPECT_TRUE(plain.counts_steps);
  const RuleInfo& amsgrad = rule_named("adamw_amsgrad");
  EXPECT_EQ(Names(amsgrad.state_names.begin(), amsgrad.state_names.end()),
            (Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
}

TEST(RuleTable, DescribesSgd) {
  const RuleInfo& plain = rule_named("sgd");
  EXPECT_EQ(Names(plain.option_names.begin(), plain.option_names.end()),
            (Names{"lr", "momentum", "dampening", "weight_decay", "nesterov"}));
  EXPECT_TRUE(plain.state_names.empty());
  EXPECT_FALSE(plain.counts_steps);
  const RuleInfo& momentum = rule_named("sgd_momentum");
  EXPECT_EQ(Names(momentum.state_names.begin(), momentum.state_names.end()),
            (Names{"momentum_buffer"}));
}

TEST(RuleTable, AnUnknownRuleIsRefusedWithTheKnownOnes) {
  for (const RuleInfo& rule : rules()) {
    expect_error(ErrorKind::kBadValue, {"'adamv'", std::string(rule.name)},
                 [] { find_rule("adamv"); });
  }
}

TEST(RuleTable, ScalarsOfAdamWAreTorchsByHand) {
  const std::vector<double> options{0.5, 0.25, 0.75, 1e-3, 0.125};
  AdamWRule<false>::Scalars<double> scalars{};
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
  AdamWRule<false>::Scalars<double> wide{};
  AdamWRule<false>::Scalars<float> narrow{};
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

}  // namespace
}  // namespace tradewind
