// The scalar oracle: one element at a time, in the precision asked for, from the very functors that
// the kernels compile. It tells apart "the rule is wrong" (compare with torch) from "a kernel is"
// (compare with this: to the bit in the kernel's precision, within tolerance in float64; rules that
// take norms within tolerance always, as the order of sums differs). A matrix rule's direction is
// taken as it is: orthogonalizing is the caller's.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "step/rule_table.h"
#include "step/rules/all.h"

namespace tradewind {

// states[s][i]: state s of element i, in the order of the rule's state_names.
template <class T>
struct OracleArrays {
  std::vector<T> parameter;
  std::vector<T> gradient;
  std::vector<std::vector<T>> states;
};

template <class Rule, class T>
void oracle_step(const double* options, std::int64_t step, bool is_first, T multiplier,
                 OracleArrays<T>& arrays) {
  typename Rule::Options typed;
  __builtin_memcpy(&typed, options, sizeof(typed));
  const auto scalars = Rule::template scalars<T>(typed, step, is_first);
  std::vector<T> directions(arrays.parameter.size());
  double parameter_squares = 0.0;
  double direction_squares = 0.0;
  for (std::size_t i = 0; i < arrays.parameter.size(); ++i) {
    T states[Rule::kNumStates == 0 ? 1 : Rule::kNumStates] = {};
    for (int s = 0; s < Rule::kNumStates; ++s) states[s] = arrays.states[std::size_t(s)][i];
    const T gradient = arrays.gradient[i] * multiplier;
    T& parameter = arrays.parameter[i];
    if constexpr (Rule::kNeeds == Needs::kElement) {
      Rule::template apply<T>(scalars, gradient, parameter, states);
    } else if constexpr (Rule::kNeeds == Needs::kNorms) {
      Rule::template advance<T>(scalars, gradient, parameter, states);
      directions[i] = Rule::template direction<T>(scalars, parameter, states);
    } else {
      directions[i] = Rule::template advance<T>(scalars, gradient, parameter, states);
    }
    for (int s = 0; s < Rule::kNumStates; ++s) arrays.states[std::size_t(s)][i] = states[s];
    parameter_squares += static_cast<double>(parameter) * static_cast<double>(parameter);
    direction_squares += static_cast<double>(directions[i]) * static_cast<double>(directions[i]);
  }
  if constexpr (Rule::kNeeds != Needs::kElement) {
    double scale = 1.0;
    if constexpr (Rule::kNeeds == Needs::kNorms) {
      scale = Rule::scale(std::sqrt(parameter_squares), std::sqrt(direction_squares));
    }
    for (std::size_t i = 0; i < arrays.parameter.size(); ++i) {
      Rule::template finish<T>(scalars, static_cast<T>(scale), directions[i], arrays.parameter[i]);
    }
  }
}

template <class T, class... Rules>
void oracle_step_among(RuleList<Rules...>, int rule_idx, const std::vector<double>& options,
                       std::int64_t step, bool is_first, T multiplier, OracleArrays<T>& arrays) {
  int idx = 0;
  ((idx++ == rule_idx ? oracle_step<Rules, T>(options.data(), step, is_first, multiplier, arrays)
                      : void()),
   ...);
}

// Updates `arrays` in place by the rule of that name. Throws Error(kBadValue) for sizes that
// differ.
template <class T>
void oracle_step(std::string_view rule_name, const std::vector<double>& options, std::int64_t step,
                 bool is_first, T multiplier, OracleArrays<T>& arrays) {
  const int rule_idx = find_rule(rule_name);
  const RuleInfo& rule = rules()[static_cast<std::size_t>(rule_idx)];
  bool fits = options.size() == rule.option_names.size() &&
              arrays.states.size() == rule.state_names.size() &&
              arrays.gradient.size() == arrays.parameter.size();
  for (const auto& state : arrays.states) fits = fits && state.size() == arrays.parameter.size();
  if (!fits) {
    fail(ErrorKind::kBadValue, "oracle ", rule_name, ": expected ", rule.option_names.size(),
         " options and ", rule.state_names.size(), " states, each array of one length");
  }
  oracle_step_among(AllRules{}, rule_idx, options, step, is_first, multiplier, arrays);
}

}  // namespace tradewind
