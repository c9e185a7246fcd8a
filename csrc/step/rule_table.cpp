#include "step/rule_table.h"

#include <array>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "step/rules/all.h"

namespace tradewind {
namespace {

template <class Rule, class T>
void fill_scalars(const double* options, std::int64_t step, bool is_first, ScalarBlock* out) {
  using Scalars = typename Rule::template Scalars<T>;
  static_assert(sizeof(Scalars) <= sizeof(ScalarBlock) && std::is_trivially_copyable_v<Scalars>);
  typename Rule::Options typed;
  static_assert(sizeof(typed) == sizeof(double) * std::size(Rule::kOptionNames));
  static_assert(std::size(Rule::kOptionNames) <= kMaxOptions && Rule::kNumStates <= kMaxStates);
  std::memcpy(&typed, options, sizeof(typed));
  const Scalars scalars = Rule::template scalars<T>(typed, step, is_first);
  std::memcpy(out->bytes, &scalars, sizeof(scalars));
}

template <class Rule>
RuleInfo describe() {
  constexpr auto kCount = static_cast<std::size_t>(Rule::kNumStates);
  RuleInfo info{Rule::kName,
                Rule::kNeeds,
                Rule::kOptionNames,
                {Rule::kStateNames, kCount},
                {Rule::kStateIsPositive, kCount},
                Rule::kCountsSteps,
                &fill_scalars<Rule, float>,
                &fill_scalars<Rule, double>,
                nullptr};
  if constexpr (Rule::kNeeds == Needs::kNorms) {
    info.scale = [](double parameter_norm, double direction_norm) {
      return Rule::scale(parameter_norm, direction_norm);
    };
  }
  return info;
}

template <class... Rules>
std::array<RuleInfo, sizeof...(Rules)> describe_all(RuleList<Rules...>) {
  return {describe<Rules>()...};
}

}  // namespace

std::span<const RuleInfo> rules() {
  static const auto kTable = describe_all(AllRules{});
  return kTable;
}

int find_rule(std::string_view name) {
  std::string known;
  for (std::size_t i = 0; i < rules().size(); ++i) {
    if (rules()[i].name == name) return static_cast<int>(i);
    known += (known.empty() ? "" : ", ") + std::string(rules()[i].name);
  }
  fail(ErrorKind::kBadValue, "update rule '", name, "': expected one of ", known);
}

}  // namespace tradewind
