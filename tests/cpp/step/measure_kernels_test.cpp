// Every measure kernel against the contract of the norm (measure_reference.h), to the bit.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "step/guarded_array.h"
#include "step/measure_reference.h"
#include "step/sample_values.h"

namespace tradewind {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class MeasureKernels : public testing::TestWithParam<std::tuple<std::string_view, int>> {
 protected:
  [[nodiscard]] DType dtype() const { return static_cast<DType>(std::get<1>(GetParam())); }

  template <class Type>
  std::vector<BlockMeasure> measure(const std::vector<typename Type::Stored>& values,
                                    std::size_t shift = 0) const {
    const auto num_elements = static_cast<std::int64_t>(values.size());
    const auto num_blocks = static_cast<std::size_t>(num_norm_blocks(num_elements));
    GuardedArray<typename Type::Stored> input(values.data(), values.size(), shift);
    const std::vector<BlockMeasure> poison(num_blocks, {-1.0, -1.0, -1});
    GuardedArray<BlockMeasure> blocks(poison.data(), num_blocks, 0);
    kernels_for(std::get<0>(GetParam()))
        .measure[std::get<1>(GetParam())](input.data(), num_elements, blocks.data());
    EXPECT_TRUE(blocks.guards_are_intact());
    EXPECT_TRUE(input.guards_are_intact());
    return {blocks.data(), blocks.data() + num_blocks};
  }

  template <class Type>
  void check(const std::vector<typename Type::Stored>& values, std::size_t shift = 0) const {
    const std::vector<BlockMeasure> expected = reference_measures<Type>(values);
    const std::vector<BlockMeasure> got = measure<Type>(values, shift);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t b = 0; b < got.size(); ++b) {
      ASSERT_TRUE(same_measure(got[b], expected[b]))
          << "block " << b << " of " << values.size() << " elements: " << got[b].sum_of_squares
          << ", " << got[b].max_abs << ", " << got[b].num_zeros << "; expected "
          << expected[b].sum_of_squares << ", " << expected[b].max_abs << ", "
          << expected[b].num_zeros;
    }
  }
};

std::vector<std::size_t> lengths() {
  std::vector<std::size_t> all{8192, 10000};
  for (std::size_t length = 0; length <= 130; ++length) all.push_back(length);
  for (std::size_t length = 4060; length <= 4130; ++length) all.push_back(length);
  return all;
}

TEST_P(MeasureKernels, GiveTheContractsBitsAtEveryLengthAndAlignment) {
  visit_format(dtype(), [&]<class Type>() {
    for (const std::size_t length : lengths()) {
      const auto values = sample_values<Type>(length, length);
      for (const std::size_t shift : {0, 1, 3}) check<Type>(values, shift);
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(MeasureKernels, AreCloseToALongDoubleSum) {
  visit_format(dtype(), [&]<class Type>() {
    const auto values = sample_values<Type>(5, 20000);
    long double exact = 0.0L;
    for (const auto value : values) {
      const long double wide = Type::decode(value);
      exact += wide * wide;
    }
    double sum = 0.0;
    for (const BlockMeasure& block : measure<Type>(values)) sum += block.sum_of_squares;
    // All terms are positive; each passes 128 additions in its lane, 5 halvings, 5 blocks and one
    // rounding of its square: at most 139 * 2^-53 of the sum.
    EXPECT_NEAR(sum, static_cast<double>(exact), 139 * 0x1p-53 * static_cast<double>(exact));
  });
}

TEST_P(MeasureKernels, StayFiniteForTheLargestFiniteValues) {
  if (dtype() == DType::kFloat64) GTEST_SKIP() << "squares of large float64 values overflow";
  visit_format(dtype(), [&]<class Type>() {
    using Stored = typename Type::Stored;
    Stored largest{};
    if constexpr (sizeof(Stored) == 2) {
      largest = static_cast<Stored>(Type::encode(INFINITY) - 1);
    } else {
      largest = std::numeric_limits<Stored>::max();
    }
    const double value = Type::decode(largest);
    for (const BlockMeasure& block : measure<Type>(std::vector<Stored>(3 * 4096, largest))) {
      EXPECT_TRUE(std::isfinite(block.sum_of_squares));
      // 134 roundings.
      EXPECT_NEAR(block.sum_of_squares / (value * value), 4096.0, 4096.0 * 134 * 0x1p-53);
      EXPECT_EQ(block.max_abs, value);
      EXPECT_EQ(block.num_zeros, 0);
    }
  });
}

TEST_P(MeasureKernels, ALargeFloat64OverflowsTheSumAndNotTheMaximum) {
  if (dtype() != DType::kFloat64) GTEST_SKIP() << "squares of other types cannot overflow";
  const std::vector<BlockMeasure> blocks = measure<Float64Format>({1.0, -1e200, 0.0});
  EXPECT_EQ(blocks[0].sum_of_squares, kInfinity);
  EXPECT_EQ(blocks[0].max_abs, 1e200);
  EXPECT_EQ(blocks[0].num_zeros, 1);
}

// In every lane and in the tail: infinity above all numbers, NaN of either sign above infinity.
TEST_P(MeasureKernels, ShowNaNAndInfinityAtEveryPlaceOfABlock) {
  visit_format(dtype(), [&]<class Type>() {
    for (const std::size_t length : {1, 31, 33, 70}) {
      for (std::size_t place = 0; place < length; ++place) {
        auto values = sample_values<Type>(7, length);
        for (const double sign : {1.0, -1.0}) {
          values[place] = Type::encode(sign * kInfinity);
          EXPECT_EQ(measure<Type>(values)[0].sum_of_squares, kInfinity);
          EXPECT_EQ(measure<Type>(values)[0].max_abs, kInfinity);
          auto with_both = values;
          with_both[(place + 32) % length] = Type::encode(std::copysign(kNaN, sign));
          EXPECT_TRUE(std::isnan(measure<Type>(with_both)[0].sum_of_squares));
          EXPECT_TRUE(std::isnan(measure<Type>(with_both)[0].max_abs));
          check<Type>(with_both);
        }
      }
    }
  });
}

TEST_P(MeasureKernels, ZerosOfBothSignsCountAndSubnormalsDoNot) {
  visit_format(dtype(), [&]<class Type>() {
    const double tiny = smallest_value<Type>();
    for (const std::size_t length : {3, 32, 37, 4096, 4099}) {
      std::vector<typename Type::Stored> values(length, Type::encode(-0.0));
      values[length / 2] = Type::encode(0.0);
      EXPECT_EQ(measure<Type>(values)[0].num_zeros, std::min<std::int64_t>(values.size(), 4096));
      EXPECT_FALSE(std::signbit(measure<Type>(values)[0].max_abs));
      values[length / 3] = Type::encode(-tiny);
      EXPECT_EQ(measure<Type>(values)[0].max_abs, tiny);
      check<Type>(values);
    }
  });
}

TEST_P(MeasureKernels, FindTheLargestAtEveryPlace) {
  visit_format(dtype(), [&]<class Type>() {
    for (std::size_t place = 0; place < 70; ++place) {
      std::vector<typename Type::Stored> values(70, Type::encode(1.5));
      values[place] = Type::encode(place % 2 == 0 ? 2.0 : -2.0);
      EXPECT_EQ(measure<Type>(values)[0].max_abs, 2.0) << place;
    }
  });
}

TEST_P(MeasureKernels, KeepTheBlocksApart) {
  visit_format(dtype(), [&]<class Type>() {
    std::vector<typename Type::Stored> values(3 * 4096, Type::encode(0.0));
    values[4096] = Type::encode(2.0);
    values[2 * 4096 - 1] = Type::encode(3.0);
    const std::vector<BlockMeasure> blocks = measure<Type>(values);
    EXPECT_TRUE(same_measure(blocks[0], {0.0, 0.0, 4096}));
    EXPECT_TRUE(same_measure(blocks[1], {13.0, 3.0, 4094}));
    EXPECT_TRUE(same_measure(blocks[2], {0.0, 0.0, 4096}));
  });
}

std::string name_of(const testing::TestParamInfo<MeasureKernels::ParamType>& info) {
  const auto& [isa, dtype] = info.param;
  return std::string(isa) + "_" + std::string(dtype_name(static_cast<DType>(dtype)));
}

INSTANTIATE_TEST_SUITE_P(All, MeasureKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::Range(0, kNumFloatingDTypes)),
                         name_of);

}  // namespace
}  // namespace tradewind
