// Sums of parts, of each ISA, codec and dtype, against additions one by one in the parts' order: to
// the bit.
#include <gtest/gtest.h>

#include <string>

#include "base/isa.h"
#include "share/kernels.h"
#include "share/share_values.h"

namespace tradewind {
namespace {

// Parts in memory of their own: as values of Type, or on the wire.
template <class Type>
struct Parts {
  std::vector<FencedArray<typename Type::Stored>> values;
  std::vector<FencedArray<std::uint32_t>> wires;
  std::vector<SumPart> parts;
  std::vector<std::vector<typename Type::Compute>> numbers;  // what each stands for

  Parts(Codec codec, std::size_t num_parts, std::size_t length, Sample sample,
        bool (*is_values)(std::size_t)) {
    for (std::size_t p = 0; p < num_parts; ++p) {
      const auto stored = share_values<Type>(sample, 100 * p + length, length);
      std::vector<typename Type::Compute> number;
      for (const auto value : stored) number.push_back(Type::decode(value));
      if (codec == Codec::kNone || is_values(p)) {
        values.emplace_back(stored);
        parts.push_back({values.back().data(), is_values(p)});
      } else {
        const Bytes wire = WireReference(codec).encode(as_floats<Type>(stored));
        wires.push_back(fenced_wire(wire));
        parts.push_back({wires.back().data(), false});
        const std::vector<float> decoded = WireReference(codec).decode(wire, length);
        number.assign(decoded.begin(), decoded.end());
      }
      numbers.push_back(number);
    }
  }

  [[nodiscard]] std::vector<typename Type::Stored> sum(double divisor) const {
    using T = typename Type::Compute;
    std::vector<typename Type::Stored> result;
    for (std::size_t i = 0; i < numbers[0].size(); ++i) {
      T total = numbers[0][i];
      for (std::size_t p = 1; p < numbers.size(); ++p) total = total + numbers[p][i];
      result.push_back(Type::encode(static_cast<double>(total / static_cast<T>(divisor))));
    }
    return result;
  }
};

constexpr double kDivisors[] = {2.0, 3.0, 7.0};

class SumKernels : public testing::TestWithParam<std::tuple<std::string_view, Codec>> {
 protected:
  [[nodiscard]] Codec codec() const { return std::get<1>(GetParam()); }

  template <class Type>
  void run(const Parts<Type>& parts, std::size_t length, double divisor,
           typename Type::Stored* out) const {
    share_kernels_for(std::get<0>(GetParam()))
        .sum[static_cast<int>(codec())][static_cast<int>(Type::kDType)](
            parts.parts.data(), static_cast<std::int64_t>(parts.parts.size()),
            static_cast<std::int64_t>(length), divisor, out);
  }

  template <class Type>
  void expect_sum(const Parts<Type>& parts, double divisor,
                  const std::vector<typename Type::Stored>& got, const std::string& what) const {
    const auto expected = parts.sum(divisor);
    ASSERT_EQ(expected.size(), got.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(same_value<Type>(expected[i], got[i])) << what << ", element " << i;
    }
  }

  // For the dtypes that the codec takes.
  template <class Check>
  void for_dtypes(const Check& check) const {
    for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
      if (!takes(codec(), static_cast<DType>(dtype))) continue;
      visit_format(static_cast<DType>(dtype), check);
      if (HasFatalFailure()) return;
    }
  }
};

bool is_third(std::size_t part) { return part % 3 == 2; }

TEST_P(SumKernels, AgreeWithAdditionsInOrderAtEveryLength) {
  for_dtypes([&]<class Type>() {
    for (const std::size_t length : share_lengths()) {
      for (const std::size_t num_parts : {1U, 2U, 3U, 8U}) {
        const Parts<Type> parts(codec(), num_parts, length, kSamples[length % 5], is_third);
        for (const double divisor : {1.0, kDivisors[length % 3]}) {
          FencedArray<typename Type::Stored> out(length);
          run(parts, length, divisor, out.data());
          EXPECT_TRUE(out.guards_are_intact());
          expect_sum(parts, divisor, out.values(),
                     std::string(dtype_name(Type::kDType)) + ", length " + std::to_string(length) +
                         " of " + std::to_string(num_parts));
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST_P(SumKernels, MayBeWrittenOverAnyOfTheValues) {
  for_dtypes([&]<class Type>() {
    for (const std::size_t num_parts : {1U, 2U, 5U}) {
      for (std::size_t own = 0; own < num_parts; ++own) {
        for (const double divisor : {1.0, 3.0}) {
          Parts<Type> parts(codec(), num_parts, 1300, Sample::kOrdinary,
                            [](std::size_t) { return true; });
          run(parts, 1300, divisor, parts.values[own].data());
          for (std::size_t p = 0; p < num_parts; ++p) {
            EXPECT_TRUE(parts.values[p].guards_are_intact());
          }
          expect_sum(parts, divisor, parts.values[own].values(), "own " + std::to_string(own));
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST_P(SumKernels, MayBeWrittenOverTheOwnValuesBesideWires) {
  for_dtypes([&]<class Type>() {
    Parts<Type> parts(codec(), 4, 1300, Sample::kOrdinary, is_third);
    auto* own = codec() == Codec::kNone ? parts.values[2].data() : parts.values[0].data();
    run(parts, 1300, 4.0, own);
    expect_sum(parts, 4.0, {own, own + 1300}, "own among wires");
  });
}

INSTANTIATE_TEST_SUITE_P(All, SumKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::Values(Codec::kNone, Codec::kBfloat16,
                                                          Codec::kFloat16, Codec::kInt8)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

// --- by hand -------------------------------------------------------------------------------------

template <class Type>
typename Type::Stored sum_of(const std::vector<double>& values, double divisor) {
  std::vector<typename Type::Stored> stored;
  for (const double value : values) stored.push_back(Type::encode(value));
  std::vector<SumPart> parts;
  for (const auto& value : stored) parts.push_back({&value, true});
  typename Type::Stored result{};
  share_kernels_for("baseline")
      .sum[0][static_cast<int>(Type::kDType)](parts.data(), static_cast<std::int64_t>(parts.size()),
                                              1, divisor, &result);
  return result;
}

TEST(Sum, TheOrderOfPartsIsPartOfTheResult) {
  EXPECT_EQ(sum_of<Float32Format>({0x1p24, 1.0, 1.0}, 1.0), 0x1p24F);
  EXPECT_EQ(sum_of<Float32Format>({1.0, 1.0, 0x1p24}, 1.0), 0x1p24F + 2.0F);
}

TEST(Sum, Divides) {
  // Multiplied by 49's reciprocal, some of these have other bits.
  int num_different = 0;
  for (int i = 1; i < 200; ++i) {
    const float value = sum_of<Float32Format>({double(i), double(i), double(i)}, 49.0);
    EXPECT_EQ(value, static_cast<float>(3 * i) / 49.0F);
    num_different += value != static_cast<float>(3 * i) * (1.0F / 49.0F) ? 1 : 0;
  }
  EXPECT_GT(num_different, 0);
}

TEST(Sum, RoundsOnce) {
  // In bfloat16 every addition of 2^-9 to 1 would be lost.
  EXPECT_EQ(sum_of<BFloat16Format>({1.0, 0x1p-9, 0x1p-9, 0x1p-9, 0x1p-9}, 1.0),
            BFloat16Format::encode(1.0 + 0x1p-7));
  EXPECT_EQ(sum_of<Float16Format>({65504.0, 65504.0}, 2.0), Float16Format::encode(65504.0));
}

TEST(Sum, OfFloat64IsInFloat64) {
  EXPECT_EQ(sum_of<Float64Format>({1.0, 0x1p-40, 0x1p-50}, 3.0), (1.0 + 0x1p-40 + 0x1p-50) / 3.0);
}

TEST(Sum, OfOnePartKeepsNegativeZero) {
  EXPECT_TRUE(std::signbit(sum_of<Float32Format>({-0.0}, 1.0)));
  EXPECT_TRUE(std::signbit(sum_of<Float32Format>({-0.0, -0.0, -0.0}, 2.0)));
}

}  // namespace
}  // namespace tradewind
