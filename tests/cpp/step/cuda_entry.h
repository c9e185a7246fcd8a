// One slot of a CudaTable: how it is stored, and its memory with sample contents.
#pragma once

#include <algorithm>
#include <array>

#include "step/cuda_memory.h"
#include "step/rule_options.h"
#include "step/rule_table.h"

namespace tradewind {

struct CudaSlotSpec {
  int rule_idx = 0;
  std::int64_t num_elements = 0;
  Format parameter = Format::kFloat32;
  Format gradient = Format::kFloat32;
  Master master = Master::kNone;
  std::array<Format, kMaxStates> states = {};
  std::size_t shift = 0;  // elements by which each array misses its alignment
  double sign = 1.0;
  bool is_fresh = false;  // states of zero, no step before this one; else two

  [[nodiscard]] bool is_double() const { return parameter == Format::kFloat64; }
  [[nodiscard]] const RuleInfo& rule() const { return rules()[static_cast<std::size_t>(rule_idx)]; }
};

struct CudaEntry {
  CudaSlotSpec spec;
  GuardedBytes parameter, gradient, master, step, has_stepped, direction;
  std::array<GuardedBytes, kMaxStates> states, exponents;
};

inline CudaEntry sample_entry(const CudaSlotSpec& spec, std::uint64_t seed) {
  CudaEntry entry;
  entry.spec = spec;
  const auto count = static_cast<std::size_t>(spec.num_elements);
  entry.parameter = sample_bytes(spec.parameter, count, spec.shift, seed);
  entry.gradient = sample_bytes(spec.gradient, count, 3 * spec.shift, seed + 1);
  if (spec.master == Master::kFloat32) {
    entry.master = sample_bytes(Format::kFloat32, count, 2 * spec.shift, seed + 2);
  } else if (spec.master == Master::kSplit) {
    entry.master = GuardedBytes(2 * count, 4 * spec.shift);
    SplitMix random(seed + 2);
    for (std::size_t i = 0; i < count; ++i) {
      const SplitFloat split = split_float(static_cast<float>(sample_of(random, Format::kFloat32)));
      entry.parameter.as<std::uint16_t>()[i] = split.high;
      entry.master.as<std::uint16_t>()[i] = split.low;
    }
  }
  const std::size_t num_states = spec.rule().state_names.size();
  for (std::size_t s = 0; s < num_states; ++s) {
    const Format format = spec.states[s];
    const bool is_positive = spec.rule().state_is_positive[s];
    const std::size_t shift = (s + 2) * spec.shift;
    const auto bytes = static_cast<std::size_t>(format_bytes(format));
    const auto num_exponents = static_cast<std::size_t>(num_exponent_blocks(spec.num_elements));
    if (spec.is_fresh) {
      entry.states[s] = GuardedBytes(count * bytes, shift * bytes);
      if (is_blockwise(format)) entry.exponents[s] = GuardedBytes(num_exponents, spec.shift);
      continue;
    }
    entry.states[s] = sample_state(format, count, shift, is_positive, seed + 3 + s);
    if (is_blockwise(format)) {
      entry.exponents[s] = sample_exponents(num_exponents, spec.shift, is_positive, seed + 10 + s);
    }
  }
  const bool is_random = std::any_of(
      spec.states.begin(), spec.states.begin() + static_cast<std::ptrdiff_t>(num_states),
      [](Format format) { return format >= Format::kStochasticBFloat16; });
  if (spec.rule().counts_steps || is_random) {
    entry.step = GuardedBytes(sizeof(float), 0);
    *entry.step.as<float>() = spec.is_fresh ? 0.0F : 2.0F;
  }
  entry.has_stepped = GuardedBytes(1, 0);
  *entry.has_stepped.as<std::uint8_t>() = spec.is_fresh ? 0 : 1;
  if (spec.rule().needs == Needs::kMatrix) {
    entry.direction = GuardedBytes(count * (spec.is_double() ? 8 : 4), 0);
  }
  return entry;
}

}  // namespace tradewind
