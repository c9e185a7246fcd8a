// float32 to bfloat16 and back: to nearest even, at random, and split into two halves.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "step/bit_patterns.h"
#include "step/format.h"
#include "step/random_formats.h"

namespace tradewind {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

TEST(FormatBytes, AreThoseOfTheStoredElements) {
  using enum Format;
  EXPECT_EQ(format_bytes(kFloat32), 4);
  EXPECT_EQ(format_bytes(kFloat64), 8);
  for (const Format format : {kBFloat16, kFloat16, kStochasticBFloat16}) {
    EXPECT_EQ(format_bytes(format), 2);
    EXPECT_FALSE(is_blockwise(format));
  }
  for (const Format format : {kSigned8, kPositive8}) {
    EXPECT_EQ(format_bytes(format), 1);
    EXPECT_TRUE(is_blockwise(format));
  }
  for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
    EXPECT_EQ(format_bytes(format_of(static_cast<DType>(dtype))),
              element_bytes(static_cast<DType>(dtype)));
  }
}

TEST(BFloat16, EveryValueDecodesByDefinitionAndComesBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto stored = static_cast<std::uint16_t>(bits);
    const float value = from_bfloat16(stored);
    ASSERT_EQ(bits_in(value), bits << 16U);
    ASSERT_TRUE(same_value<Float32Format>(value, BFloat16Format::decode(stored))) << bits;
    ASSERT_EQ(to_bfloat16(value), std::isnan(value) ? 0x7FC0 : stored);
    ASSERT_EQ(bits_of(value), bits_in(value));
    ASSERT_EQ(bits_in(float_of(bits << 16U)), bits << 16U);
  }
}

TEST(BFloat16, RoundsToNearestEvenAtEveryExponent) {
  for (const float value : telling_floats(1'000'000)) {
    ASSERT_EQ(to_bfloat16(value), BFloat16Format::encode(value)) << std::hexfloat << value;
  }
  EXPECT_EQ(to_bfloat16(kLargest), 0x7F80);
  EXPECT_EQ(to_bfloat16(-0x1p-149F), 0x8000);
  EXPECT_EQ(to_bfloat16(float_with(0x7F800001)), 0x7FC0);  // a signalling NaN
}

TEST(StochasticBFloat16, FollowsItsDefinitionForEveryValue) {
  SplitMix random(2);
  for (const float value : telling_floats(1'000'000)) {
    for (const std::uint32_t half :
         {0U, 1U, 0x8000U, 0xFFFFU, static_cast<std::uint32_t>(random.next() & 0xFFFFU)}) {
      ASSERT_EQ(to_bfloat16_stochastic(value, half), reference_stochastic(value, half))
          << std::hexfloat << value << " with " << half;
    }
  }
}

TEST(StochasticBFloat16, NeverChangesWhatItCanHold) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = float_with(bits << 16U);
    for (const std::uint32_t half : {0U, 1U, 0x7FFFU, 0x8000U, 0xFFFFU}) {
      ASSERT_EQ(to_bfloat16_stochastic(value, half), std::isnan(value) ? 0x7FC0U : bits);
    }
  }
}

TEST(StochasticBFloat16, GoesUpAsOftenAsTheCutOffPartSays) {
  // All 65536 halves: the count is exact, so the mean is the value itself.
  for (const float value : {1.0F + 0x1p-23F, -3.14159F, 1e-3F, 7.77e-39F, -0x1p-149F, 2.9e38F}) {
    double sum = 0.0;
    for (std::uint32_t half = 0; half < 0x10000; ++half) {
      sum += from_bfloat16(to_bfloat16_stochastic(value, half));
    }
    EXPECT_EQ(sum / 65536.0, value) << value;
  }
}

TEST(StochasticBFloat16, IsUnbiasedOverElementsStepsAndParameters) {
  constexpr std::int64_t kElements = 4000;
  constexpr std::int64_t kSteps = 50;
  const float value = 1.0F + 0x1p-7F * 0.3F;  // 0.3 of the way between two
  for (int state = 0; state < 3; ++state) {
    std::int64_t num_up = 0;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const std::uint32_t key = random_key(7, step, state);
      for (std::int64_t i = 0; i < kElements; ++i) {
        num_up += to_bfloat16_stochastic(value, random_half(random_bits(key, i), state)) != 0x3F80;
      }
    }
    constexpr double kTrials = kElements * kSteps;
    const double probability = (double{value} - 1.0) / 0x1p-7;
    EXPECT_NEAR(static_cast<double>(num_up) / kTrials, probability,
                coin_bound(probability, kTrials))
        << "state " << state;
  }
}

TEST(StochasticBFloat16, InfinitiesStayAndTheLargestMayBecomeOne) {
  for (const std::uint32_t half : {0U, 0xFFFFU}) {
    EXPECT_EQ(to_bfloat16_stochastic(INFINITY, half), 0x7F80);
    EXPECT_EQ(to_bfloat16_stochastic(-INFINITY, half), 0xFF80);
    EXPECT_EQ(to_bfloat16_stochastic(float_with(0xFFFFFFFF), half), 0x7FC0);
  }
  EXPECT_EQ(to_bfloat16_stochastic(kLargest, 0), 0x7F7F);
  EXPECT_EQ(to_bfloat16_stochastic(-kLargest, 0xFFFF), 0xFF80);
}

TEST(SplitFloat, JoinsToTheSameBitsAtEveryExponent) {
  for (const float value : telling_floats(3'000'000)) {
    const SplitFloat split = split_float(value);
    const ReferenceSplit expected = reference_split(value);
    ASSERT_EQ(split.high, expected.high) << std::hexfloat << value;
    ASSERT_EQ(split.low, expected.low) << std::hexfloat << value;
    const float joined = join_float(split.high, split.low);
    ASSERT_TRUE(same_value<Float32Format>(joined, value)) << std::hexfloat << value;
  }
}

TEST(SplitFloat, TheHighHalfIsTheNearestBFloat16) {
  for (const float value : telling_floats(100'000)) {
    if (!std::isfinite(value)) continue;
    const std::uint16_t high = split_float(value).high;
    const std::uint16_t even = BFloat16Format::encode(value);
    // Ties alone differ, and go away from zero.
    const bool is_tie = (bits_in(value) & 0xFFFFU) == 0x8000U;
    ASSERT_EQ(high, is_tie ? (bits_in(value) >> 16U) + 1U : even) << std::hexfloat << value;
  }
}

TEST(SplitFloat, KeepsExtremesAndNaN) {
  for (const float value : {0.0F, -0.0F, kLargest, -kLargest, INFINITY, -INFINITY, 0x1p-149F,
                            -0x1p-126F, 1.0F + 0x1p-8F, 1.0F + 3 * 0x1p-8F}) {
    const SplitFloat split = split_float(value);
    EXPECT_EQ(bits_in(join_float(split.high, split.low)), bits_in(value)) << value;
  }
  for (const std::uint32_t bits : {0x7FC00000U, 0x7F800001U, 0xFFFFFFFFU, 0xFF800001U}) {
    const SplitFloat split = split_float(float_with(bits));
    EXPECT_EQ(split.high, 0x7FC0);
    EXPECT_TRUE(std::isnan(join_float(split.high, split.low)));
  }
}

}  // namespace
}  // namespace tradewind
