// The rules as data: names, options and states by index, and each rule's scalars behind a function
// pointer, so that callers need no templates. The index is the rule's place in AllRules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "step/rule.h"

namespace tradewind {

// More than there are: a constant, so that a changed rule rebuilds the kernels and not every unit.
inline constexpr int kMaxRules = 32;

// Room for any rule's Scalars<T>; which T, the parameter's dtype says.
struct ScalarBlock {
  alignas(16) std::byte bytes[96];
};

struct RuleInfo {
  std::string_view name;
  Needs needs;
  std::span<const char* const> option_names;
  std::span<const char* const> state_names;
  std::span<const bool> state_is_positive;
  bool counts_steps;
  void (*scalars_float)(const double* options, std::int64_t step, bool is_first, ScalarBlock* out);
  void (*scalars_double)(const double* options, std::int64_t step, bool is_first, ScalarBlock* out);
  // Needs::kNorms: the direction's factor, from the norms of parameter and direction; else null.
  double (*scale)(double parameter_norm, double direction_norm);
};

std::span<const RuleInfo> rules();
// The rule's index. Throws Error(kBadValue) that lists the known names.
int find_rule(std::string_view name);

}  // namespace tradewind
