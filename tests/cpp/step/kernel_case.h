// One update of one rule on arrays of one format: what the scalar oracle makes of them, and what a
// kernel does, in place between guards.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "step/guarded_array.h"
#include "step/kernels.h"
#include "step/oracle.h"
#include "step/rule_options.h"
#include "step/sample_values.h"

namespace tradewind {

struct Update {
  int rule_idx;
  std::vector<double> options;
  std::int64_t step;
  bool is_first;
  double multiplier;

  [[nodiscard]] const RuleInfo& rule() const { return rules()[static_cast<std::size_t>(rule_idx)]; }
};

template <class Format>
struct KernelArrays {
  std::vector<typename Format::Stored> parameter;
  std::vector<typename Format::Stored> gradient;
  std::vector<std::vector<typename Format::Stored>> states;
};

template <class Format>
KernelArrays<Format> sample_arrays(const RuleInfo& rule, std::size_t num_elements,
                                   std::uint64_t seed) {
  KernelArrays<Format> arrays{
      sample_values<Format>(seed, num_elements), sample_values<Format>(seed + 1, num_elements), {}};
  for (std::size_t s = 0; s < rule.state_names.size(); ++s) {
    const bool is_square = std::string_view(rule.state_names[s]).find("sq") != std::string::npos;
    arrays.states.push_back(is_square ? sample_magnitudes<Format>(seed + 2 + s, num_elements)
                                      : sample_values<Format>(seed + 2 + s, num_elements));
  }
  return arrays;
}

// The oracle in the kernel's compute precision: load, update, round to nearest even.
template <class Format>
KernelArrays<Format> expected_arrays(const Update& update, const KernelArrays<Format>& before) {
  using Compute = typename Format::Compute;
  const auto decode = [](const std::vector<typename Format::Stored>& stored) {
    std::vector<Compute> values;
    for (const auto value : stored) values.push_back(Format::decode(value));
    return values;
  };
  OracleArrays<Compute> oracle{decode(before.parameter), decode(before.gradient), {}};
  for (const auto& state : before.states) oracle.states.push_back(decode(state));
  oracle_step<Compute>(update.rule().name, update.options, update.step, update.is_first,
                       static_cast<Compute>(update.multiplier), oracle);
  KernelArrays<Format> after = before;
  for (std::size_t i = 0; i < before.parameter.size(); ++i) {
    after.parameter[i] = Format::encode(oracle.parameter[i]);
    for (std::size_t s = 0; s < before.states.size(); ++s) {
      after.states[s][i] = Format::encode(oracle.states[s][i]);
    }
  }
  return after;
}

template <class Format>
void expect_prefix(const std::vector<typename Format::Stored>& expected,
                   const typename Format::Stored* got, std::size_t num_elements,
                   const std::string& what) {
  if (std::memcmp(expected.data(), got, num_elements * sizeof(*got)) == 0) return;
  for (std::size_t i = 0; i < num_elements; ++i) {
    ASSERT_TRUE(same_value<Format>(expected[i], got[i]))
        << what << "[" << i << "] of " << num_elements << ": expected "
        << Format::decode(expected[i]) << ", got " << Format::decode(got[i]);
  }
}

// Runs the kernel on the first num_elements of `before`, each array at another misalignment where
// `shift` is not zero, and compares all arrays and guards.
template <class Format>
void check_kernel(SweepKernel kernel, const Update& update, const KernelArrays<Format>& before,
                  const KernelArrays<Format>& expected, std::size_t num_elements,
                  std::size_t shift) {
  using Array = GuardedArray<typename Format::Stored>;
  std::vector<Array> arrays;
  arrays.emplace_back(before.parameter.data(), num_elements, shift);
  arrays.emplace_back(before.gradient.data(), num_elements, 3 * shift);
  for (const auto& state : before.states) {
    arrays.emplace_back(state.data(), num_elements, (2 * arrays.size() + 1) * shift);
  }
  const ScalarBlock scalars =
      scalars_for(update.rule(), Format::kDType, update.options, update.step, update.is_first);
  SweepRange range{arrays[0].data(),  arrays[1].data(), {}, static_cast<std::int64_t>(num_elements),
                   update.multiplier, &scalars};
  for (std::size_t s = 0; s < before.states.size(); ++s) range.states[s] = arrays[2 + s].data();
  kernel(range);
  expect_prefix<Format>(expected.parameter, arrays[0].data(), num_elements, "parameter");
  expect_prefix<Format>(before.gradient, arrays[1].data(), num_elements, "gradient");
  for (std::size_t s = 0; s < before.states.size(); ++s) {
    expect_prefix<Format>(expected.states[s], arrays[2 + s].data(), num_elements,
                          update.rule().state_names[s]);
  }
  for (const Array& array : arrays) ASSERT_TRUE(array.guards_are_intact());
}

}  // namespace tradewind
