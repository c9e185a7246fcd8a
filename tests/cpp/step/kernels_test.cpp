// Every sweep kernel, of each ISA, rule and dtype, against the scalar oracle: to the bit.
#include "step/kernels.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "step/kernel_case.h"
#include "step/rules/all.h"

namespace tradewind {
namespace {

class SweepKernels : public testing::TestWithParam<std::tuple<std::string_view, int, int>> {
 protected:
  [[nodiscard]] int rule_idx() const { return std::get<1>(GetParam()); }
  [[nodiscard]] DType dtype() const { return static_cast<DType>(std::get<2>(GetParam())); }
  [[nodiscard]] const RuleInfo& rule() const {
    return rules()[static_cast<std::size_t>(rule_idx())];
  }
  [[nodiscard]] SweepKernel kernel() const {
    return kernels_for(std::get<0>(GetParam())).sweep[rule_idx()][std::get<2>(GetParam())];
  }
  // The first step, and a later one without decay and variants.
  [[nodiscard]] std::vector<Update> updates() const {
    return {{rule_idx(), example_options(rule(), false), 1, true, 1.0},
            {rule_idx(), example_options(rule(), false), 2, false, -0.37},
            {rule_idx(), example_options(rule(), true), 1000, false, 0.37}};
  }
};

// Every tail of every vector width, and lengths around a norm block.
std::vector<std::size_t> lengths() {
  std::vector<std::size_t> all{4095, 4096, 4097, 10000};
  for (std::size_t length = 0; length <= 130; ++length) all.push_back(length);
  return all;
}

TEST_P(SweepKernels, AgreeWithTheOracleAtEveryLengthAndAlignment) {
  visit_format(dtype(), [&]<class Format>() {
    for (const Update& update : updates()) {
      const auto before = sample_arrays<Format>(rule(), 10000, 1);
      const auto expected = expected_arrays<Format>(update, before);
      for (const std::size_t length : lengths()) {
        for (const std::size_t shift : {0, 1}) {
          check_kernel<Format>(kernel(), update, before, expected, length, shift);
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST_P(SweepKernels, AgreeWithTheOracleAtEveryMisalignment) {
  visit_format(dtype(), [&]<class Format>() {
    const Update update = updates()[1];
    const auto before = sample_arrays<Format>(rule(), 200, 11);
    const auto expected = expected_arrays<Format>(update, before);
    for (std::size_t shift = 0; shift < 64 / sizeof(typename Format::Stored); ++shift) {
      check_kernel<Format>(kernel(), update, before, expected, 200, shift);
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(SweepKernels, PropagateNaNAndInfinityAsTheOracleDoes) {
  visit_format(dtype(), [&]<class Format>() {
    for (const Update& update : updates()) {
      auto before = sample_arrays<Format>(rule(), 3000, 21);
      sprinkle_nonfinite<Format>(31, before.parameter);
      sprinkle_nonfinite<Format>(32, before.gradient);
      for (std::size_t s = 0; s < before.states.size(); ++s) {
        sprinkle_nonfinite<Format>(33 + s, before.states[s]);
      }
      const auto expected = expected_arrays<Format>(update, before);
      check_kernel<Format>(kernel(), update, before, expected, 3000, 1);
      if (HasFatalFailure()) return;
    }
  });
}

std::string name_of(const testing::TestParamInfo<SweepKernels::ParamType>& info) {
  const auto& [isa, rule_idx, dtype] = info.param;
  return std::string(isa) + "_" + std::string(rules()[static_cast<std::size_t>(rule_idx)].name) +
         "_" + std::string(dtype_name(static_cast<DType>(dtype)));
}

INSTANTIATE_TEST_SUITE_P(All, SweepKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::Range(0, num_rules()),
                                          testing::Range(0, kNumFloatingDTypes)),
                         name_of);

}  // namespace
}  // namespace tradewind
