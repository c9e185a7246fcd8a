// Tables that several tests step.
#pragma once

#include "step/cuda_steps.h"

namespace tradewind {

// A few rules and formats, one of them with state that rounds at random.
inline CudaTable small_table() {
  CudaTable table;
  for (const char* rule : {"adamw", "sgd_momentum", "lion", "lamb", "muon"}) {
    for (const std::int64_t length : {300, 0, 5000}) {
      CudaSlotSpec spec;
      spec.rule_idx = find_rule(rule);
      spec.num_elements = length;
      spec.states = {Format::kSigned8, Format::kStochasticBFloat16, Format::kFloat32};
      spec.is_fresh = length == 300;
      table.add(spec);
    }
  }
  table.settings().gradient_multiplier = 1.0;
  table.settings().vetoes_nonfinite = 1;
  return table;
}

// Every way to store a slot of a rule, with lengths around each boundary.
inline void add_storages(CudaTable& table, int rule_idx, std::size_t shift, bool has_fresh = true) {
  using enum Format;
  struct Parameter {
    Format format, gradient;
    Master master;
  };
  const Parameter parameters[] = {
      {kFloat32, kFloat32, Master::kNone},   {kFloat64, kFloat64, Master::kNone},
      {kBFloat16, kBFloat16, Master::kNone}, {kBFloat16, kFloat32, Master::kFloat32},
      {kBFloat16, kFloat16, Master::kSplit}, {kFloat16, kFloat16, Master::kNone},
      {kFloat16, kFloat64, Master::kFloat32}};
  const Format states[] = {kFloat32, kBFloat16, kFloat16, kStochasticBFloat16, kSigned8, kFloat64};
  const std::int64_t lengths[] = {4096 + 1024 + 257, 1, 255, 4096, 31, 1026, 8192 + 3, 256, 0};
  const RuleInfo& rule = rules()[static_cast<std::size_t>(rule_idx)];
  for (const Parameter& parameter : parameters) {
    for (const Format state : states) {
      CudaSlotSpec spec;
      spec.rule_idx = rule_idx;
      spec.num_elements = lengths[table.entries().size() % std::size(lengths)];
      spec.parameter = parameter.format;
      spec.gradient = parameter.gradient;
      spec.master = parameter.master;
      for (std::size_t s = 0; s < rule.state_names.size(); ++s) {
        const bool is_unsigned = state == kSigned8 && rule.state_is_positive[s];
        spec.states[s] = is_unsigned ? kPositive8 : state;
      }
      spec.shift = shift;
      spec.sign = table.entries().size() % 2 == 0 ? 1.0 : -1.0;
      spec.is_fresh = has_fresh && table.entries().size() % 4 == 3;
      table.add(spec);
    }
  }
}

}  // namespace tradewind
