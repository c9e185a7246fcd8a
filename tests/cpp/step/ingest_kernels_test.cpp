// Every ingest kernel: sums in float32 to the bit, and the measure of what was summed.
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

class IngestKernels : public testing::TestWithParam<std::tuple<std::string_view, int>> {
 protected:
  [[nodiscard]] const Kernels& isa() const { return kernels_for(std::get<0>(GetParam())); }
  [[nodiscard]] DType dtype() const { return static_cast<DType>(std::get<1>(GetParam())); }

  template <class Type>
  void check(std::size_t length, std::size_t shift, bool overwrites, bool measures) const {
    const auto values = sample_values<Type>(length, length);
    const auto before = sample_values<Float32Format>(length + 1, length);
    std::vector<float> expected(length);
    for (std::size_t i = 0; i < length; ++i) {
      const auto value = static_cast<float>(Type::decode(values[i]));
      expected[i] = overwrites ? value : before[i] + value;
    }
    const auto num_elements = static_cast<std::int64_t>(length);
    const auto num_blocks = static_cast<std::size_t>(num_norm_blocks(num_elements));
    const std::vector<BlockMeasure> poison(num_blocks, {-1.0, -1.0, -1});
    GuardedArray<typename Type::Stored> input(values.data(), length, shift);
    GuardedArray<float> sum(before.data(), length, shift);
    GuardedArray<BlockMeasure> blocks(poison.data(), num_blocks, 0);
    isa().ingest[static_cast<int>(dtype())](input.data(), num_elements, overwrites, sum.data(),
                                            measures ? blocks.data() : nullptr);
    EXPECT_TRUE(input.guards_are_intact());
    EXPECT_TRUE(sum.guards_are_intact());
    EXPECT_TRUE(blocks.guards_are_intact());
    for (std::size_t i = 0; i < length; ++i) {
      ASSERT_TRUE(same_value<Float32Format>(sum.data()[i], expected[i])) << i << " of " << length;
    }
    if (!measures) return;
    const auto measured = reference_measures<Float32Format>({sum.data(), sum.data() + length});
    for (std::size_t b = 0; b < num_blocks; ++b) {
      ASSERT_TRUE(same_measure(blocks.data()[b], measured[b])) << "block " << b << " of " << length;
    }
  }
};

TEST_P(IngestKernels, SumAndMeasureAtEveryLengthAndAlignment) {
  visit_format(dtype(), [&]<class Type>() {
    std::vector<std::size_t> lengths{4095, 4096, 4097, 8192, 10000};
    for (std::size_t length = 0; length <= 70; ++length) lengths.push_back(length);
    for (const std::size_t length : lengths) {
      for (const std::size_t shift : {0, 1, 3}) {
        for (const bool overwrites : {false, true}) {
          check<Type>(length, shift, overwrites, true);
          check<Type>(length, shift, overwrites, false);
        }
      }
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(IngestKernels, WhatIsOverwrittenDoesNotMatter) {
  visit_format(dtype(), [&]<class Type>() {
    const std::vector<typename Type::Stored> values(100, Type::encode(2.0));
    std::vector<float> sum(100, std::numeric_limits<float>::quiet_NaN());
    isa().ingest[static_cast<int>(dtype())](values.data(), 100, true, sum.data(), nullptr);
    EXPECT_EQ(sum, std::vector<float>(100, 2.0F));
  });
}

TEST(IngestKernelTable, HasNoneForFloat64) {
  for (const std::string_view isa : supported_isas()) {
    EXPECT_EQ(kernels_for(isa).ingest[static_cast<int>(DType::kFloat64)], nullptr);
  }
}

std::string name_of(const testing::TestParamInfo<IngestKernels::ParamType>& info) {
  const auto& [isa, dtype] = info.param;
  return std::string(isa) + "_" + std::string(dtype_name(static_cast<DType>(dtype)));
}

INSTANTIATE_TEST_SUITE_P(All, IngestKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::Values(static_cast<int>(DType::kFloat32),
                                                          static_cast<int>(DType::kBFloat16),
                                                          static_cast<int>(DType::kFloat16))),
                         name_of);

}  // namespace
}  // namespace tradewind
