// Every sweep kernel, of each ISA, rule, phase and precision, against the scalar oracle: to the
// bit, where arrays lie as the arithmetic takes them. Other formats: kernel_storage_test.cpp.
#include "step/kernels.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "step/kernel_case.h"

namespace tradewind {
namespace {

class SweepKernels : public testing::TestWithParam<std::tuple<std::string_view, int, Format>> {
 protected:
  [[nodiscard]] int rule_idx() const { return std::get<1>(GetParam()); }
  [[nodiscard]] const RuleInfo& rule() const {
    return rules()[static_cast<std::size_t>(rule_idx())];
  }
  [[nodiscard]] Storage storage() const { return uniform_storage(std::get<2>(GetParam())); }
  [[nodiscard]] KernelCase kernel_case(const Update& update, Phase phase,
                                       std::size_t shift = 0) const {
    return {kernels_for(std::get<0>(GetParam())), storage(), update, phase, shift};
  }
  // Elements do not depend on one another: what is expected of some is expected of fewer.
  void check_head(const KernelCase& c, const UpdateArrays& before, const Expected& all,
                  std::size_t count) const {
    Expected expected{all.arrays.head(count), {}, {}, {}, {}};
    const auto sums = [&](const std::vector<double>& values) {
      const auto end = values.begin() + static_cast<std::ptrdiff_t>(count);
      return storage().is_double() ? lane_sums(std::vector<double>(values.begin(), end))
                                   : lane_sums(std::vector<float>(values.begin(), end));
    };
    expected.parameter_squares = sums(all.before);
    expected.change_squares = sums(all.change);
    check_kernel(c, before.head(count), expected);
  }
};

// Every tail of every vector width, and lengths around a norm block; or some of them.
std::vector<std::size_t> lengths(bool is_every) {
  if (!is_every) return {1, 33, 100, 4097};
  std::vector<std::size_t> all{4095, 4096, 4097, 10000};
  for (std::size_t length = 0; length <= 130; ++length) all.push_back(length);
  return all;
}

TEST_P(SweepKernels, AgreeWithTheOracleAtEveryLength) {
  const std::vector<Update> updates = example_updates(rule_idx());
  for (std::size_t idx = 0; idx < updates.size(); ++idx) {
    for (const Phase phase : phases_of(rule())) {
      const UpdateArrays before = sample_arrays(rule(), storage(), 10000, 1);
      const Expected expected = expected_update(storage(), updates[idx], phase, before);
      for (const std::size_t length : lengths(idx == 1)) {
        check_head(kernel_case(updates[idx], phase, length % 2), before, expected, length);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(SweepKernels, AgreeWithTheOracleAtEveryMisalignment) {
  const Update update = example_updates(rule_idx())[1];
  for (const Phase phase : phases_of(rule())) {
    const UpdateArrays before = sample_arrays(rule(), storage(), 200, 11);
    const Expected expected = expected_update(storage(), update, phase, before);
    for (std::size_t shift = 0; shift < 16; ++shift) {
      check_kernel(kernel_case(update, phase, shift), before, expected);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(SweepKernels, PropagateNaNAndInfinityAsTheOracleDoes) {
  const auto sprinkle = [](std::uint64_t seed, StoredArray& array) {
    std::vector<double> values = decode_array<double>(array);
    sprinkle_nonfinite<Float64Format>(seed, values);
    array = encode_array(array.format, values);
  };
  for (const Update& update : example_updates(rule_idx())) {
    for (const Phase phase : phases_of(rule())) {
      UpdateArrays before = sample_arrays(rule(), storage(), 3000, 21);
      sprinkle(31, before.parameter);
      sprinkle(32, before.gradient);
      if (before.direction.size() > 0) sprinkle(33, before.direction);
      for (std::size_t s = 0; s < before.states.size(); ++s) sprinkle(34 + s, before.states[s]);
      check_kernel(kernel_case(update, phase, 1), before,
                   expected_update(storage(), update, phase, before));
      if (HasFatalFailure()) return;
    }
  }
}

// The two phases by hand, with the scale that the norms give, are the oracle's one step.
TEST(ExpectedUpdate, OfBothPhasesIsTheOraclesStep) {
  const Storage storage = uniform_storage(Format::kFloat64);
  for (const std::string_view name : {"lamb", "muon"}) {
    Update update = example_updates(find_rule(name))[1];
    const UpdateArrays before = sample_arrays(update.rule(), storage, 1000, 41);
    const Expected advanced = expected_update(storage, update, Phase::kUpdate, before);
    update.scale = 1.0;
    if (update.rule().scale != nullptr) {
      double parameter_squares = 0.0;
      double direction_squares = 0.0;
      for (const double value : advanced.before) parameter_squares += value * value;
      for (const double value : advanced.change) direction_squares += value * value;
      update.scale =
          update.rule().scale(std::sqrt(parameter_squares), std::sqrt(direction_squares));
    }
    const Expected after = expected_update(storage, update, Phase::kFinish, advanced.arrays);
    OracleArrays<double> oracle{
        decode_array<double>(before.parameter), decode_array<double>(before.gradient), {}};
    for (const auto& state : before.states) oracle.states.push_back(decode_array<double>(state));
    oracle_step<double>(name, update.options, update.step, update.is_first, update.multiplier,
                        oracle);
    EXPECT_EQ(decode_array<double>(after.arrays.parameter), oracle.parameter) << name;
    for (std::size_t s = 0; s < oracle.states.size(); ++s) {
      EXPECT_EQ(decode_array<double>(after.arrays.states[s]), oracle.states[s]) << name;
    }
  }
}

std::string name_of(const testing::TestParamInfo<SweepKernels::ParamType>& info) {
  const auto& [isa, rule_idx, format] = info.param;
  return std::string(isa) + "_" + std::string(rules()[static_cast<std::size_t>(rule_idx)].name) +
         (format == Format::kFloat64 ? "_float64" : "_float32");
}

INSTANTIATE_TEST_SUITE_P(All, SweepKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::Range(0, num_rules()),
                                          testing::Values(Format::kFloat32, Format::kFloat64)),
                         name_of);

}  // namespace
}  // namespace tradewind
