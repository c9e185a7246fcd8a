// Loads and stores of the 16-bit types, over all of their values, through the SGD kernel: with
// lr = -1 and no decay it computes parameter + gradient * multiplier.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "step/kernels.h"
#include "step/rule_options.h"
#include "step/stored_formats.h"

namespace tradewind {
namespace {

template <class Type>
std::vector<std::uint16_t> add(const Kernels& kernels, std::vector<std::uint16_t> values,
                               const std::vector<std::uint16_t>& addends, double multiplier) {
  const int rule_idx = find_rule("sgd");
  const std::vector<double> options{-1.0, 0.0, 0.0, 0.0, 0.0};
  const ScalarBlock scalars =
      scalars_for(rules()[static_cast<std::size_t>(rule_idx)], Type::kDType, options, 1, true);
  SweepRange range{};
  range.parameter = values.data();
  range.parameter_format = format_of(Type::kDType);
  range.gradient = addends.data();
  range.gradient_format = format_of(Type::kDType);
  range.num_elements = static_cast<std::int64_t>(values.size());
  range.gradient_multiplier = multiplier;
  range.scalars = &scalars;
  kernels.sweep[rule_idx][0][0](range);
  return values;
}

std::vector<std::uint16_t> all_patterns() {
  std::vector<std::uint16_t> patterns(1 << 16);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  return patterns;
}

class Conversion : public testing::TestWithParam<std::string_view> {
 protected:
  template <class Type>
  void check_identity() {
    // Adding -0 changes nothing, not even the sign of a zero.
    const std::vector<std::uint16_t> addends(1 << 16, 0x8000);
    const auto got = add<Type>(kernels_for(GetParam()), all_patterns(), addends, 1.0);
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(same_value<Type>(static_cast<std::uint16_t>(i), got[i])) << i;
    }
  }

  // Halves, quarters and just beside a half of the last place above every value.
  template <class Type>
  void check_rounding() {
    const std::vector<std::uint16_t> ones(1 << 16, Type::encode(1.0));
    for (const double part : {0.25, 0.5, 0.5 + 0x1p-10, 0.75, -0.25, -0.5, -0.75}) {
      for (const double magnitude : {1.0, 0x1p-3, 0x1p-12, 0x1p7}) {
        // One unit in the last place of a value in [magnitude, 2 magnitude).
        const double unit =
            Type::decode(static_cast<std::uint16_t>(Type::encode(magnitude) + 1)) - magnitude;
        const auto addend = static_cast<float>(part * unit);
        const auto got = add<Type>(kernels_for(GetParam()), all_patterns(), ones, addend);
        for (std::size_t i = 0; i < got.size(); ++i) {
          const float sum = Type::decode(static_cast<std::uint16_t>(i)) + addend;
          ASSERT_TRUE(same_value<Type>(Type::encode(sum), got[i])) << i << " + " << addend;
        }
      }
    }
  }
};

TEST_P(Conversion, EveryValueComesBack) {
  check_identity<BFloat16Format>();
  check_identity<Float16Format>();
}

TEST_P(Conversion, RoundsToNearestEven) {
  check_rounding<BFloat16Format>();
  check_rounding<Float16Format>();
}

TEST_P(Conversion, BFloat16NaNIsTorchs) {
  const auto got = add<BFloat16Format>(kernels_for(GetParam()), {0x7F81, 0xFFFF, 0x7FC0, 0x7F80},
                                       {0, 0, 0, 0xFF80}, 1.0);
  for (const std::uint16_t bits : got) EXPECT_EQ(bits, 0x7FC0);
}

TEST(StoredFormats, TheTestsOwnConversionRoundsToNearestEven) {
  EXPECT_EQ(BFloat16Format::encode(1.0), 0x3F80);
  EXPECT_EQ(BFloat16Format::encode(1.0 + 0x1p-8), 0x3F80);            // a tie goes to even
  EXPECT_EQ(BFloat16Format::encode(1.0 + 0x1p-8 + 0x1p-20), 0x3F81);  // and no tie goes up
  EXPECT_EQ(BFloat16Format::encode(1.0 + 3 * 0x1p-8), 0x3F82);        // a tie goes to even
  EXPECT_EQ(Float16Format::encode(-65504.0), 0xFBFF);
  EXPECT_EQ(Float16Format::encode(65519.9), 0x7BFF);
  EXPECT_EQ(Float16Format::encode(65520.0), 0x7C00);
  EXPECT_EQ(Float16Format::encode(0x1p-24), 0x0001);
  EXPECT_EQ(Float16Format::encode(0x1p-25), 0x0000);
  EXPECT_EQ(Float16Format::encode(0x1p-14), 0x0400);
  EXPECT_EQ(Float16Format::decode(0x3555), 0x1.554p-2F);
}

INSTANTIATE_TEST_SUITE_P(All, Conversion, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tradewind
