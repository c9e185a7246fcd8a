// Options for every rule of the table, by name, so that a new rule is tested as soon as it exists.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string_view>
#include <vector>

#include "arena/dtype.h"
#include "step/rule.h"
#include "step/rule_table.h"

namespace tradewind {

inline int num_rules() { return static_cast<int>(rules().size()); }

// `plain` turns weight decay and variants off.
inline std::vector<double> example_options(const RuleInfo& rule, bool plain) {
  static const std::map<std::string_view, double> kExamples{
      {"lr", 0.0123},      {"beta1", 0.9},     {"beta2", 0.999},  {"eps", 1e-8},
      {"momentum", 0.875}, {"dampening", 0.1}, {"nesterov", 1.0}, {"weight_decay", 0.0321},
      {"alpha", 0.99},     {"lr_decay", 0.25}};
  std::vector<double> options;
  for (const std::string_view name : rule.option_names) {
    const auto example = kExamples.find(name);
    if (example == kExamples.end()) {
      ADD_FAILURE() << "option '" << name << "' of rule '" << rule.name
                    << "': expected an example value in rule_options.h";
      options.push_back(0.5);
    } else {
      const bool is_variant = name == "weight_decay" || name == "nesterov";
      options.push_back(plain && is_variant ? 0.0 : example->second);
    }
  }
  return options;
}

inline ScalarBlock scalars_for(const RuleInfo& rule, DType dtype,
                               const std::vector<double>& options, std::int64_t step,
                               bool is_first) {
  ScalarBlock block{};
  const auto fill = dtype == DType::kFloat64 ? rule.scalars_double : rule.scalars_float;
  fill(options.data(), step, is_first, &block);
  return block;
}

}  // namespace tradewind
