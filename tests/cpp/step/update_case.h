// One update of one rule on arrays of any formats, and what becomes of them: decoded by the tests'
// own definitions, updated by the rule's own functors in the kernel's precision, encoded again.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "arena/layout.h"
#include "step/kernels.h"
#include "step/oracle.h"
#include "step/rule_options.h"
#include "step/stored_array.h"

namespace tradewind {

// 8-bit states are named kSigned8 here; positive ones become kPositive8.
struct Storage {
  Format parameter = Format::kFloat32;
  Master master = Master::kNone;
  Format gradient = Format::kFloat32;
  std::array<Format, kMaxStates> states{};

  [[nodiscard]] bool is_double() const { return parameter == Format::kFloat64; }
  [[nodiscard]] Format state(const RuleInfo& rule, std::size_t idx) const {
    const bool is_positive = rule.state_is_positive[idx] && states[idx] == Format::kSigned8;
    return is_positive ? Format::kPositive8 : states[idx];
  }
};

inline Storage uniform_storage(Format format) {
  return {format, Master::kNone, format, {format, format, format}};
}

struct Update {
  int rule_idx = 0;
  std::vector<double> options;
  std::int64_t step = 1;
  bool is_first = true;
  double multiplier = 1.0;
  double scale = 0.75;
  std::uint32_t random_key = 0x600DCAFE;
  std::int64_t first_element = 0;

  [[nodiscard]] const RuleInfo& rule() const { return rules()[static_cast<std::size_t>(rule_idx)]; }
};

// The first step, and a later one without decay and variants.
inline std::vector<Update> example_updates(int rule_idx) {
  const RuleInfo& rule = rules()[static_cast<std::size_t>(rule_idx)];
  return {{rule_idx, example_options(rule, false), 1, true, 1.0},
          {rule_idx, example_options(rule, false), 2, false, -0.37},
          {rule_idx, example_options(rule, true), 1000, false, 0.37}};
}

struct UpdateArrays {
  StoredArray parameter;
  StoredArray master;  // the low halves of a split one as if they were bfloat16
  StoredArray gradient;
  std::vector<StoredArray> states;
  StoredArray direction;  // of matrix rules

  [[nodiscard]] UpdateArrays head(std::size_t count) const {
    UpdateArrays first{parameter.head(count), master, gradient.head(count), {}, direction};
    if (master.size() > 0) first.master = master.head(count);
    for (const StoredArray& state : states) first.states.push_back(state.head(count));
    if (direction.size() > 0) first.direction = direction.head(count);
    return first;
  }
  friend bool operator==(const UpdateArrays&, const UpdateArrays&) = default;
};

template <class T>
void encode_parameter(Master master, const std::vector<T>& values, UpdateArrays& arrays) {
  arrays.parameter = encode_array(arrays.parameter.format, values);
  if (master == Master::kFloat32) arrays.master = encode_array(Format::kFloat32, values);
  if (master != Master::kSplit) return;
  arrays.master = arrays.parameter;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const ReferenceSplit split = reference_split(static_cast<float>(values[i]));
    arrays.parameter.put(i, split.high);
    arrays.master.put(i, split.low);
  }
}

template <class T>
std::vector<T> decode_parameter(Master master, const UpdateArrays& arrays) {
  if (master == Master::kNone) return decode_array<T>(arrays.parameter);
  if (master == Master::kFloat32) return decode_array<T>(arrays.master);
  std::vector<T> values;
  for (std::size_t i = 0; i < arrays.parameter.size(); ++i) {
    const std::int64_t high = arrays.parameter.at<std::uint16_t>(i);
    const auto bits = static_cast<std::uint32_t>((high << 16) + arrays.master.at<std::int16_t>(i));
    float value = 0.0F;
    std::memcpy(&value, &bits, sizeof(value));
    values.push_back(value);
  }
  return values;
}

inline UpdateArrays sample_arrays(const RuleInfo& rule, const Storage& storage, std::size_t count,
                                  std::uint64_t seed) {
  UpdateArrays arrays{sample_array(storage.parameter, seed, count),
                      {},
                      sample_array(storage.gradient, seed + 1, count),
                      {},
                      {}};
  if (storage.master != Master::kNone) {
    const StoredArray exact = sample_array(Format::kFloat32, seed, count);
    encode_parameter(storage.master, decode_array<float>(exact), arrays);
  }
  for (std::size_t s = 0; s < rule.state_names.size(); ++s) {
    const Format format = storage.state(rule, s);
    arrays.states.push_back(sample_array(format, seed + 2 + s, count, rule.state_is_positive[s]));
  }
  if (rule.state_names.size() > 1 && std::string_view(rule.state_names[1]) == "grad_avg") {
    // Above the squares of the averages, however they are stored: their difference has a root.
    std::vector<float> squares = decode_array<float>(arrays.states[0]);
    const std::vector<float> averages = decode_array<float>(arrays.states[1]);
    for (std::size_t i = 0; i < count; ++i) {
      squares[i] = 1.5F * (1.0F + squares[i] + averages[i] * averages[i]);
    }
    arrays.states[0] = encode_array(arrays.states[0].format, squares);
  }
  if (rule.needs == Needs::kMatrix) {
    arrays.direction =
        sample_array(storage.is_double() ? Format::kFloat64 : Format::kFloat32, seed + 9, count);
  }
  return arrays;
}

// The parameter before a phase and how far it moved (the direction, where a rule advances).
template <class T>
struct Moves {
  std::vector<T> before, change;
};

// Squares as the kernels add them: by norm block, in 32 lanes of the arithmetic's precision.
template <class T>
std::vector<double> lane_sums(const std::vector<T>& values) {
  std::vector<double> sums;
  for (std::size_t begin = 0; begin < values.size(); begin += kNormBlockElements) {
    std::array<T, 32> lanes{};
    const std::size_t end = std::min(values.size(), begin + kNormBlockElements);
    for (std::size_t i = begin; i < end; ++i) lanes[(i - begin) % 32] += values[i] * values[i];
    for (std::size_t width = 16; width > 0; width /= 2) {
      for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    sums.push_back(static_cast<double>(lanes[0]));
  }
  return sums;
}

}  // namespace tradewind
