// Every measure kernel against the contract of the norm, written out: element i of a block adds to
// lane i mod 32 in float64, lanes are then halved five times.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "arena/layout.h"
#include "step/guarded_array.h"
#include "step/kernels.h"
#include "step/sample_values.h"

namespace tradewind {
namespace {

template <class Format>
std::vector<double> reference_sums(const std::vector<typename Format::Stored>& values) {
  std::vector<double> sums;
  for (std::size_t begin = 0; begin < values.size(); begin += kNormBlockElements) {
    std::array<double, 32> lanes{};
    const std::size_t end = std::min(values.size(), begin + kNormBlockElements);
    for (std::size_t i = begin; i < end; ++i) {
      const double value = Format::decode(values[i]);
      lanes[(i - begin) % 32] += value * value;
    }
    for (std::size_t width = 16; width > 0; width /= 2) {
      for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    sums.push_back(lanes[0]);
  }
  return sums;
}

class MeasureKernels : public testing::TestWithParam<std::tuple<std::string_view, int>> {
 protected:
  [[nodiscard]] DType dtype() const { return static_cast<DType>(std::get<1>(GetParam())); }

  template <class Format>
  std::vector<double> measure(const std::vector<typename Format::Stored>& values,
                              std::size_t shift = 0) const {
    const auto num_elements = static_cast<std::int64_t>(values.size());
    const auto num_blocks = static_cast<std::size_t>(num_norm_blocks(num_elements));
    GuardedArray<typename Format::Stored> input(values.data(), values.size(), shift);
    const std::vector<double> untouched(num_blocks, -1.0);
    GuardedArray<double> sums(untouched.data(), num_blocks, 0);
    kernels_for(std::get<0>(GetParam()))
        .measure[std::get<1>(GetParam())](input.data(), num_elements, sums.data());
    EXPECT_TRUE(sums.guards_are_intact());
    EXPECT_TRUE(input.guards_are_intact());
    return {sums.data(), sums.data() + num_blocks};
  }
};

TEST_P(MeasureKernels, GiveTheContractsBitsAtEveryLengthAndAlignment) {
  visit_format(dtype(), [&]<class Format>() {
    std::vector<std::size_t> lengths{4095, 4096, 4097, 4100, 8192, 10000};
    for (std::size_t length = 0; length <= 130; ++length) lengths.push_back(length);
    for (const std::size_t length : lengths) {
      const auto values = sample_values<Format>(length, length);
      const std::vector<double> expected = reference_sums<Format>(values);
      for (const std::size_t shift : {0, 1, 3}) {
        EXPECT_EQ(measure<Format>(values, shift), expected) << length;
      }
    }
  });
}

TEST_P(MeasureKernels, AreCloseToALongDoubleSum) {
  visit_format(dtype(), [&]<class Format>() {
    const auto values = sample_values<Format>(5, 20000);
    long double exact = 0.0L;
    for (const auto value : values) {
      const long double wide = Format::decode(value);
      exact += wide * wide;
    }
    double sum = 0.0;
    for (const double block_sum : measure<Format>(values)) sum += block_sum;
    // All terms are positive; each passes 128 additions in its lane, 5 halvings, 5 blocks and one
    // rounding of its square: at most 139 * 2^-53 of the sum.
    EXPECT_NEAR(sum, static_cast<double>(exact), 139 * 0x1p-53 * static_cast<double>(exact));
  });
}

TEST_P(MeasureKernels, StayFiniteForTheLargestFiniteValues) {
  if (dtype() == DType::kFloat64) GTEST_SKIP() << "squares of large float64 values overflow";
  visit_format(dtype(), [&]<class Format>() {
    using Stored = typename Format::Stored;
    Stored largest{};
    if constexpr (sizeof(Stored) == 2) {
      largest = static_cast<Stored>(Format::encode(INFINITY) - 1);
    } else {
      largest = std::numeric_limits<Stored>::max();
    }
    const double value = Format::decode(largest);
    for (const double sum : measure<Format>(std::vector<Stored>(3 * 4096, largest))) {
      EXPECT_TRUE(std::isfinite(sum));
      EXPECT_NEAR(sum / (value * value), 4096.0, 4096.0 * 134 * 0x1p-53);  // 134 roundings
    }
  });
}

TEST_P(MeasureKernels, ShowNaNAndInfinityAtEveryPlaceOfABlock) {
  visit_format(dtype(), [&]<class Format>() {
    for (const std::size_t length : {1, 31, 33, 70}) {
      for (std::size_t place = 0; place < length; ++place) {
        auto values = sample_values<Format>(7, length);
        values[place] = Format::encode(-std::numeric_limits<double>::infinity());
        EXPECT_EQ(measure<Format>(values)[0], std::numeric_limits<double>::infinity());
        values[place] = Format::encode(std::numeric_limits<double>::quiet_NaN());
        EXPECT_TRUE(std::isnan(measure<Format>(values)[0]));
      }
    }
  });
}

TEST_P(MeasureKernels, KeepTheBlocksApart) {
  visit_format(dtype(), [&]<class Format>() {
    std::vector<typename Format::Stored> values(3 * 4096, Format::encode(0.0));
    values[4096] = Format::encode(2.0);
    values[2 * 4096 - 1] = Format::encode(3.0);
    EXPECT_EQ(measure<Format>(values), (std::vector<double>{0.0, 13.0, 0.0}));
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
