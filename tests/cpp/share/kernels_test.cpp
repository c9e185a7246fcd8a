// Encoding and decoding, of each ISA, codec and dtype, against the reference: to the bit. Error
// feedback: error_feedback_test.cpp. Sums: sum_kernels_test.cpp.
#include "share/kernels.h"

#include <gtest/gtest.h>

#include <string>

#include "base/isa.h"
#include "share/share_values.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tradewind {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

class CodecKernels : public testing::TestWithParam<std::tuple<std::string_view, Codec>> {
 protected:
  [[nodiscard]] const ShareKernels& kernels() const {
    return share_kernels_for(std::get<0>(GetParam()));
  }
  [[nodiscard]] Codec codec() const { return std::get<1>(GetParam()); }
  [[nodiscard]] WireReference reference() const { return WireReference(codec()); }

  template <class Type>
  Bytes encode(const std::vector<typename Type::Stored>& values) const {
    const auto count = static_cast<std::int64_t>(values.size());
    FencedArray<typename Type::Stored> from(values);
    FencedArray<std::uint32_t> wire(
        static_cast<std::size_t>(wire_bytes(codec(), Type::kDType, count)) / 4);
    kernels().encode[static_cast<int>(codec())][static_cast<int>(Type::kDType)](
        from.data(), count, nullptr, wire_of(wire));
    EXPECT_TRUE(wire.guards_are_intact());
    return bytes_of(wire);
  }

  template <class Type>
  std::vector<typename Type::Stored> decode(const Bytes& bytes, std::size_t num_elements) const {
    FencedArray<std::uint32_t> wire = fenced_wire(bytes);
    FencedArray<typename Type::Stored> to(num_elements);
    kernels().decode[static_cast<int>(codec())][static_cast<int>(Type::kDType)](
        wire_of(wire), static_cast<std::int64_t>(num_elements), to.data());
    EXPECT_TRUE(to.guards_are_intact());
    return to.values();
  }

  template <class Type>
  void check(const std::vector<typename Type::Stored>& values, const std::string& what) const {
    const Bytes expected = reference().encode(as_floats<Type>(values));
    const Bytes wire = encode<Type>(values);
    ASSERT_EQ(wire, expected) << what;
    const std::vector<float> decoded = reference().decode(expected, values.size());
    const auto got = decode<Type>(wire, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(same_value<Type>(Type::encode(static_cast<double>(decoded[i])), got[i]))
          << what << ", element " << i;
    }
  }

  std::vector<float> there_and_back(const std::vector<float>& values) const {
    return decode<Float32Format>(encode<Float32Format>(values), values.size());
  }
};

TEST_P(CodecKernels, AgreeWithTheReferenceAtEveryLength) {
  for (const DType dtype : kLossyDTypes) {
    visit_format(dtype, [&]<class Type>() {
      for (const Sample sample : kSamples) {
        for (const std::size_t length : share_lengths()) {
          check<Type>(share_values<Type>(sample, length, length),
                      std::string(dtype_name(dtype)) + ", sample " +
                          std::to_string(static_cast<int>(sample)) + ", length " +
                          std::to_string(length));
          if (HasFatalFailure()) return;
        }
      }
    });
  }
}

// Where scales and roundings change: each power of two's surroundings, as a block's largest value.
TEST_P(CodecKernels, AgreeWithTheReferenceForEveryMagnitudeOfABlock) {
  SplitMix random(7);
  for (int exponent = -149; exponent < 128; ++exponent) {
    for (const float part : {1.0F, 1.0F + 0x1p-23F, 1.5F, 1.9995F, 0x1.FFCp0F, 0x1.FFDFFEp0F,
                             0x1.FFEp0F, 0x1.FFFFFEp0F}) {
      const float largest = std::ldexp(part, exponent);
      std::vector<float> values{largest, -largest};
      for (int i = 0; i < 30; ++i) {
        values.push_back(static_cast<float>(random.uniform()) * largest);
      }
      check<Float32Format>(values, "largest " + std::to_string(largest));
      if (HasFatalFailure()) return;
      for (const float value : there_and_back(values)) {
        // bfloat16 rounds the last values before float32's end to infinity, as torch does.
        const bool is_rounded_up = codec() == Codec::kBfloat16 && largest >= 0x1.FFp127F;
        ASSERT_TRUE(std::isfinite(value) || is_rounded_up) << largest;
      }
    }
  }
}

TEST_P(CodecKernels, NaNAndInfinityOfOneBlockLeaveTheOthersAlone) {
  for (const float value : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    for (const std::size_t at : {0U, 17U, 511U, 512U, 1023U, 1029U}) {
      auto values = share_values<Float32Format>(Sample::kOrdinary, 5, 1030);
      const std::vector<float> before = there_and_back(values);
      values[at] = value;
      check<Float32Format>(values, "at " + std::to_string(at));
      const std::vector<float> after = there_and_back(values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (i == at) {
          EXPECT_FALSE(std::isfinite(after[i]));
          EXPECT_TRUE(codec() == Codec::kInt8 || std::isnan(after[i]) == std::isnan(value));
        } else if (i / 512 != at / 512) {
          EXPECT_EQ(before[i], after[i]);
        } else if (codec() == Codec::kInt8) {
          EXPECT_TRUE(std::isnan(after[i]));
        } else {
          EXPECT_TRUE(std::isfinite(after[i]));
        }
      }
    }
  }
}

TEST_P(CodecKernels, ZerosStayZeros) {
  for (const float value : there_and_back(std::vector<float>(700, 0.0F))) {
    EXPECT_EQ(value, 0.0F);
    EXPECT_FALSE(std::signbit(value));
  }
}

#if defined(__x86_64__)
// torch.set_flush_denormal is per thread.
TEST_P(CodecKernels, KeepSubnormalsInEveryMode) {
  const auto values = share_values<Float32Format>(Sample::kTiny, 3, 600);
  const Bytes expected = encode<Float32Format>(values);
  const auto decoded = decode<Float32Format>(expected, values.size());
  const unsigned saved = _mm_getcsr();
  for (const unsigned mode : {0x8000U, 0x0040U, 0x8040U}) {
    _mm_setcsr(saved | mode);
    const Bytes wire = encode<Float32Format>(values);
    const auto got = decode<Float32Format>(wire, values.size());
    const bool is_unchanged = _mm_getcsr() == (saved | mode);
    _mm_setcsr(saved);
    EXPECT_TRUE(is_unchanged);
    EXPECT_EQ(wire, expected);
    EXPECT_EQ(std::memcmp(got.data(), decoded.data(), 4 * got.size()), 0);
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(All, CodecKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::ValuesIn(kLossyCodecs)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

// --- by hand, of the baseline: the reference could share a mistake -------------------------------

std::vector<float> there_and_back(Codec codec, const std::vector<float>& values,
                                  float* header = nullptr) {
  const auto count = static_cast<std::int64_t>(values.size());
  Bytes wire(static_cast<std::size_t>(wire_bytes(codec, DType::kFloat32, count)));
  const ShareKernels& kernels = share_kernels_for("baseline");
  kernels.encode[static_cast<int>(codec)][0](values.data(), count, nullptr, wire.data());
  if (header != nullptr) std::memcpy(header, wire.data(), sizeof(*header));
  std::vector<float> decoded(values.size());
  kernels.decode[static_cast<int>(codec)][0](wire.data(), count, decoded.data());
  return decoded;
}

TEST(GuardedHalf, TheHeaderIsTheLeastPowerOfTwoThatFits) {
  struct Case {
    float largest, header, decoded;
  };
  for (const Case& c :
       {Case{1e-30F, 1.0F, 0.0F}, Case{65504.0F, 1.0F, 65504.0F}, Case{65519.0F, 1.0F, 65504.0F},
        Case{65520.0F, 2.0F, 65536.0F}, Case{70000.0F, 2.0F, 70016.0F},
        Case{131038.0F, 2.0F, 131008.0F}, Case{131040.0F, 4.0F, 131072.0F},
        Case{0x1p127F, 0x1p112F, 0x1p127F}, Case{kLargest, 0x1p112F, 65504.0F * 0x1p112F}}) {
    float header = 0.0F;
    const auto decoded = there_and_back(Codec::kFloat16, {1.0F, -c.largest, kInfinity}, &header);
    EXPECT_EQ(header, c.header) << c.largest;
    EXPECT_EQ(decoded[1], -c.decoded) << c.largest;
    EXPECT_EQ(decoded[2], kInfinity);
  }
}

TEST(GuardedHalf, ItsErrorIsAHalfUnitOfFloat16) {
  for (const float scale : {1.0F, 1e3F, 1e6F, 1e20F, 3e38F}) {
    auto values = share_values<Float32Format>(Sample::kHuge, 9, 512);
    for (float& value : values) value *= scale / kLargest;
    const auto decoded = there_and_back(Codec::kFloat16, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      // Half of 2^-10 of the value, or of the smallest code beneath the block's header.
      const double least = std::max(1.0, static_cast<double>(scale) / 32752.0) * 0x1p-24;
      EXPECT_LE(std::fabs(double{decoded[i]} - double{values[i]}),
                std::max(std::fabs(double{values[i]}) * 0x1p-11, 0.5 * least));
    }
  }
}

TEST(ScaledInt8, RoundsToTheNearestEven) {
  float header = 0.0F;
  const auto decoded = there_and_back(
      Codec::kInt8, {127.0F, -127.0F, 0.5F, 1.5F, 2.5F, -0.5F, -2.5F, 3.2F}, &header);
  EXPECT_EQ(header, 1.0F);
  EXPECT_EQ(decoded, (std::vector<float>{127.0F, -127.0F, 0.0F, 2.0F, 2.0F, 0.0F, -2.0F, 3.0F}));
}

// Up to half of the header, which is a 127th of the largest, or the least number there is.
TEST(ScaledInt8, ItsErrorIsHalfAScale) {
  SplitMix random(3);
  for (int exponent = -149; exponent < 128; ++exponent) {
    std::vector<float> values;
    for (int i = 0; i < 40; ++i) {
      values.push_back(static_cast<float>(std::ldexp(random.uniform(), exponent)));
    }
    double largest = 0.0;
    for (const float value : values) largest = std::max(largest, std::fabs(double{value}));
    const auto decoded = there_and_back(Codec::kInt8, values);
    const double scale = std::max(largest / 127.0 * (1.0 + 0x1p-23), largest / 127.0 + 0x1p-149);
    for (std::size_t i = 0; i < values.size(); ++i) {
      // The quotient and the product round once each.
      EXPECT_LE(std::fabs(double{decoded[i]} - double{values[i]}), scale * (0.5 + 127 * 0x1p-23))
          << exponent;
    }
  }
}

TEST(ScaledInt8, SubnormalsTravel) {
  EXPECT_EQ(there_and_back(Codec::kInt8, {0x1p-149F, -0x1p-149F}),
            (std::vector<float>{0x1p-149F, -0x1p-149F}));
  const float largest = 190 * 0x1p-149F;
  EXPECT_EQ(there_and_back(Codec::kInt8, {largest, -2 * 0x1p-149F}),
            (std::vector<float>{largest, -2 * 0x1p-149F}));
}

TEST(Bfloat16, HasTorchsBits) {
  EXPECT_EQ(
      there_and_back(Codec::kBfloat16, {1.0F + 0x1p-8F, 1.0F + 0x1.8p-7F, -0x1p-133F, 0x1p-134F}),
      (std::vector<float>{1.0F, 1.0F + 0x1p-6F, -0x1p-133F, 0.0F}));
  EXPECT_EQ(there_and_back(Codec::kBfloat16, {kLargest, kInfinity}),
            (std::vector<float>{kInfinity, kInfinity}));
  EXPECT_TRUE(std::isnan(there_and_back(Codec::kBfloat16, {kNaN})[0]));
}

}  // namespace
}  // namespace tradewind
