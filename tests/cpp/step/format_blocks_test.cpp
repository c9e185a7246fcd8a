// 8-bit floats that share an exponent by block: codes, error bounds, and rounding without bias.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "step/bit_patterns.h"
#include "step/format.h"
#include "step/random_formats.h"

namespace tradewind {
namespace {

template <bool kSigned>
struct Kind {
  static constexpr bool kHasSign = kSigned;
};

template <class Kind>
class BlockFloats : public testing::Test {
 protected:
  static constexpr bool kHasSign = Kind::kHasSign;
  using Block = BlockFloat<kHasSign>;
  using Reference = BlockReference<kHasSign>;

  static std::uint8_t exponent_of(float largest) { return Block::block_exponent(bits_in(largest)); }
  static std::uint8_t encode(float value, std::uint8_t exponent, std::uint32_t half) {
    return Block::encode(value, Block::scale_of(exponent), half);
  }
  static float decode(std::uint8_t code, std::uint8_t exponent) {
    return Block::decode(code, exponent);
  }
  static std::uint8_t code_of(int code) { return static_cast<std::uint8_t>(code); }
  // Every block exponent that block_exponent() gives for a finite block.
  static std::vector<std::uint8_t> exponents() {
    std::vector<std::uint8_t> all;
    for (int exponent = 20; exponent <= exponent_of(std::numeric_limits<float>::max()); ++exponent)
      all.push_back(code_of(exponent));
    return all;
  }
  // Codes above the largest float32 exist where the block exponent is near its top. A value of at
  // least 1.875 * 2^127 may be rounded up to such a one, infinity, as in bfloat16.
  static bool is_finite(int code, std::uint8_t exponent) {
    return std::fabs(Reference::decode(code, exponent)) < 0x1p128;
  }
  // Values for a block whose largest is `largest`: of all magnitudes, down to subnormals.
  static std::vector<float> values_under(float largest, std::size_t count) {
    SplitMix random(3);
    std::vector<float> values{largest, 0.0F, 0x1p-149F};
    while (values.size() < count) {
      const auto bits =
          static_cast<std::uint32_t>(random.below(bits_in(largest) + std::int64_t{1}));
      const auto near = static_cast<std::int32_t>(random.below(kHasSign ? 16 << 23 : 32 << 23));
      values.push_back(float_with(bits));
      values.push_back(float_with(static_cast<std::uint32_t>(
          std::max(0, static_cast<std::int32_t>(bits_in(largest)) - near))));
    }
    return values;
  }
};

constexpr float kLargests[] = {0x1.dp127F, 1.0F,      0.9999999F, 3.5e-5F,  0x1.fffffep-80F,
                               1e-33F,     0x1p-126F, 1e-40F,     0x1p-149F};

using Kinds = testing::Types<Kind<true>, Kind<false>>;
TYPED_TEST_SUITE(BlockFloats, Kinds);

TYPED_TEST(BlockFloats, AllCodesDecodeByDefinitionAndRoundTrip) {
  for (const std::uint8_t exponent : this->exponents()) {
    for (int code = 0; code < 256; ++code) {
      if (!this->is_finite(code, exponent)) continue;
      const float value = this->decode(this->code_of(code), exponent);
      ASSERT_EQ(value, TestFixture::Reference::decode(code, exponent)) << code;
      ASSERT_EQ(std::signbit(value), this->kHasSign && code >= 128);
      for (const std::uint32_t half : {0U, 1U, 0x8000U, 0xFFFFU}) {
        ASSERT_EQ(this->encode(value, exponent, half), code) << "exponent " << int{exponent};
      }
    }
  }
}

TYPED_TEST(BlockFloats, CodesRiseWithTheirValues) {
  constexpr int kMagnitudes = this->kHasSign ? 128 : 256;
  for (const std::uint8_t exponent : this->exponents()) {
    for (int code = 1; code < kMagnitudes && this->is_finite(code, exponent); ++code) {
      ASSERT_LT(this->decode(this->code_of(code - 1), exponent),
                this->decode(this->code_of(code), exponent));
    }
  }
}

TYPED_TEST(BlockFloats, TheBlockExponentFollowsTheLargest) {
  for (const float value : telling_floats(100'000)) {
    const float largest = std::fabs(value);
    ASSERT_EQ(this->exponent_of(largest), TestFixture::Reference::block_exponent(largest))
        << std::hexfloat << largest;
  }
}

TYPED_TEST(BlockFloats, EncodeByDefinitionInEveryBlock) {
  SplitMix random(4);
  for (const float largest : kLargests) {
    const std::uint8_t exponent = this->exponent_of(largest);
    for (const float value : this->values_under(largest, 20'000)) {
      for (const std::uint32_t half :
           {0U, 0xFFFFU, static_cast<std::uint32_t>(random.next() & 0xFFFFU)}) {
        ASSERT_EQ(this->encode(value, exponent, half),
                  TestFixture::Reference::encode(value, exponent, half))
            << std::hexfloat << value << " under " << largest << " with " << half;
      }
    }
  }
}

TYPED_TEST(BlockFloats, TheLargestOfABlockNeverOverflows) {
  for (const float value : telling_floats(100'000)) {
    const float largest = std::fabs(value);
    if (!std::isfinite(largest)) continue;
    const std::uint8_t exponent = this->exponent_of(largest);
    const std::uint8_t code = this->encode(largest, exponent, 0xFFFF);
    ASSERT_EQ(code, TestFixture::Reference::encode(largest, exponent, 0xFFFF));
    ASSERT_LT(code, this->kHasSign ? 128 : 255) << std::hexfloat << largest;
    if (largest < this->decode(1, exponent)) continue;
    const double decoded = TestFixture::Reference::decode(code, exponent);
    // Up, where more than a 65536th of a step is cut off, and by an eighth at most.
    ASSERT_GE(decoded, largest * (1.0 - 0x1p-19)) << std::hexfloat << largest;
    ASSERT_LE(decoded, largest * 1.125) << std::hexfloat << largest;
    ASSERT_EQ(std::isinf(this->decode(code, exponent)), decoded == 0x1p128);
  }
}

TYPED_TEST(BlockFloats, ErrorsAreOneStepOfTheValuesExponentAtMost) {
  for (const float largest : kLargests) {
    const std::uint8_t exponent = this->exponent_of(largest);
    const double smallest = this->decode(1, exponent);
    for (const float value : this->values_under(largest, 5'000)) {
      // Codes of one exponent are an eighth of its power of two apart; below them is zero.
      const double step = value < smallest ? smallest : std::ldexp(1.0, std::ilogb(value) - 3);
      for (const std::uint32_t half : {0U, 0x8000U, 0xFFFFU}) {
        const double decoded = this->decode(this->encode(value, exponent, half), exponent);
        ASSERT_LE(std::fabs(decoded - value), step) << value << " under " << largest;
      }
    }
  }
}

// Over all 65536 random halves. What is cut off counts in 65536ths of a step, so the mean may be
// off by one of them; below the smallest code two roundings of float32 come on top.
TYPED_TEST(BlockFloats, TheMeanIsTheValueToA65536thOfAStep) {
  for (const float largest : {1.0F, 3.5e-5F, 1e-33F, 0x1.dp127F}) {
    const std::uint8_t exponent = this->exponent_of(largest);
    const double smallest = this->decode(1, exponent);
    for (const double part : {1.0, 0.37, 1e-2, 1e-4, 3e-7, 1e-9}) {
      // Of the largest, and of the smallest code.
      for (const double magnitude : {part * largest, part * smallest}) {
        const auto value = static_cast<float>(magnitude);
        double sum = 0.0;
        for (std::uint32_t half = 0; half < 0x10000; ++half) {
          sum += this->decode(this->encode(value, exponent, half), exponent);
        }
        const double step = value < smallest ? smallest : std::ldexp(1.0, std::ilogb(value) - 3);
        EXPECT_NEAR(sum / 65536.0, value, step * (1.0 / 65536.0 + 2 * 0x1p-24))
            << part << " under " << largest;
      }
    }
  }
}

TYPED_TEST(BlockFloats, ZeroStaysZeroAndSignsAreKept) {
  for (const std::uint8_t exponent : this->exponents()) {
    for (const std::uint32_t half : {0U, 0xFFFFU}) {
      ASSERT_EQ(this->decode(this->encode(0.0F, exponent, half), exponent), 0.0F);
      const float negative = this->decode(this->encode(-0.0F, exponent, half), exponent);
      ASSERT_EQ(negative, 0.0F);
      ASSERT_EQ(std::signbit(negative), this->kHasSign);
      const float value = this->decode(this->code_of(77), exponent) * 1.01F;
      const float mirrored = this->decode(this->encode(-value, exponent, half), exponent);
      const float decoded = this->decode(this->encode(value, exponent, half), exponent);
      ASSERT_EQ(mirrored, this->kHasSign ? -decoded : decoded);
    }
  }
}

TYPED_TEST(BlockFloats, ABlockWithInfinityOrNaNDecodesToNaN) {
  for (const std::uint32_t largest : {0x7F800000U, 0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU}) {
    const std::uint8_t exponent = TestFixture::Block::block_exponent(largest);
    EXPECT_EQ(exponent, 255);
    for (int code = 0; code < 256; ++code) {
      ASSERT_TRUE(std::isnan(this->decode(this->code_of(code), exponent)));
    }
  }
  for (const std::uint8_t exponent : this->exponents()) EXPECT_NE(exponent, 255);
}

}  // namespace
}  // namespace tradewind
