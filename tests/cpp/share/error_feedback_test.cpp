// What the wire loses is kept, exactly, and sent later.
#include <gtest/gtest.h>

#include <string>

#include "base/isa.h"
#include "share/kernels.h"
#include "share/share_values.h"

namespace tradewind {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class ErrorFeedback : public testing::TestWithParam<std::tuple<std::string_view, Codec>> {
 protected:
  [[nodiscard]] Codec codec() const { return std::get<1>(GetParam()); }

  template <class Type>
  Bytes encode(const std::vector<typename Type::Stored>& values, std::vector<float>* error) const {
    const auto count = static_cast<std::int64_t>(values.size());
    FencedArray<typename Type::Stored> from(values);
    FencedArray<std::uint32_t> wire(
        static_cast<std::size_t>(wire_bytes(codec(), Type::kDType, count)) / 4);
    const EncodeKernel kernel =
        share_kernels_for(std::get<0>(GetParam()))
            .encode[static_cast<int>(codec())][static_cast<int>(Type::kDType)];
    if (error == nullptr) {
      kernel(from.data(), count, nullptr, wire_of(wire));
      return bytes_of(wire);
    }
    FencedArray<float> kept(*error);
    kernel(from.data(), count, kept.data(), wire_of(wire));
    EXPECT_TRUE(kept.guards_are_intact());
    EXPECT_TRUE(wire.guards_are_intact());
    EXPECT_TRUE(values.empty() ||
                std::memcmp(from.data(), values.data(), values.size() * sizeof(values[0])) == 0);
    *error = kept.values();
    return bytes_of(wire);
  }

  std::vector<float> step(const std::vector<float>& values, std::vector<float>& error) const {
    return WireReference(codec()).decode(encode<Float32Format>(values, &error), values.size());
  }
};

TEST_P(ErrorFeedback, KeepsExactlyWhatTheWireLost) {
  const WireReference reference(codec());
  for (const DType dtype : kLossyDTypes) {
    visit_format(dtype, [&]<class Type>() {
      for (const Sample sample : kSamples) {
        for (const std::size_t length : share_lengths()) {
          const auto values = share_values<Type>(sample, length, length);
          std::vector<float> error = share_values<Float32Format>(
              sample == Sample::kTiny ? Sample::kTiny : Sample::kOrdinary, length + 9, length);
          std::vector<float> sums = as_floats<Type>(values);
          for (std::size_t i = 0; i < length; ++i) sums[i] += error[i];
          const Bytes wire = encode<Type>(values, &error);
          ASSERT_EQ(wire, reference.encode(sums));
          const std::vector<float> decoded = reference.decode(wire, length);
          for (std::size_t i = 0; i < length; ++i) {
            const float loss = sums[i] - decoded[i];
            ASSERT_EQ(error[i], std::isfinite(loss) ? loss : 0.0F)
                << dtype_name(dtype) << ", length " << length << ", element " << i;
          }
        }
      }
    });
  }
}

TEST_P(ErrorFeedback, NoErrorYetChangesNothing) {
  const auto values = share_values<Float32Format>(Sample::kOrdinary, 4, 1000);
  std::vector<float> error(values.size(), 0.0F);
  // -0 + 0 is 0: signs of zeros aside, which bfloat16 and float16 send.
  auto without_negative_zero = values;
  for (float& value : without_negative_zero) value += 0.0F;
  EXPECT_EQ(encode<Float32Format>(values, &error),
            encode<Float32Format>(without_negative_zero, nullptr));
}

// What has arrived after any number of steps is what was sent, within what is still kept.
TEST_P(ErrorFeedback, TheSumOfManyStepsIsTheSumOfTheInputs) {
  constexpr std::size_t kLength = 600;
  std::vector<float> error(kLength, 0.0F);
  std::vector<double> sent(kLength, 0.0);
  std::vector<double> arrived(kLength, 0.0);
  constexpr int kSteps = 300;
  for (int step_idx = 0; step_idx < kSteps; ++step_idx) {
    std::vector<float> values(kLength);
    SplitMix random(static_cast<std::uint64_t>(step_idx) + 50);
    for (float& value : values) value = static_cast<float>(random.uniform());
    const std::vector<float> decoded = step(values, error);
    for (std::size_t i = 0; i < kLength; ++i) {
      sent[i] += values[i];
      arrived[i] += decoded[i];
    }
  }
  for (std::size_t i = 0; i < kLength; ++i) {
    // Half a quantum of the largest there can be, 1 + that: an int8's, a bfloat16's or a float16's.
    const double quantum = codec() == Codec::kInt8       ? 1.01 / 127.0
                           : codec() == Codec::kBfloat16 ? 0x1p-7
                                                         : 0x1p-10;
    EXPECT_LE(std::fabs(error[i]), 0.5 * quantum);
    // value + error rounds to float32 in each step: to 2^-25 of a number below 2.
    EXPECT_NEAR(arrived[i] + error[i], sent[i], kSteps * 0x1p-24);
  }
}

// A value far below its block's quantum arrives all the same.
TEST_P(ErrorFeedback, AConstantArrivesOnAverage) {
  std::vector<float> values(512, 0.001F);
  values[0] = 1.0F;
  std::vector<float> error(values.size(), 0.0F);
  double arrived = 0.0;
  constexpr int kSteps = 1000;
  for (int step_idx = 0; step_idx < kSteps; ++step_idx) {
    arrived += static_cast<double>(step(values, error)[77]);
  }
  EXPECT_NEAR(arrived / kSteps, 0.001, 1.0 / 127.0 / kSteps);
}

TEST_P(ErrorFeedback, OneBadStepDoesNotSpoilTheNext) {
  for (const float bad : {kNaN, kInfinity, -kInfinity}) {
    auto values = share_values<Float32Format>(Sample::kOrdinary, 6, 700);
    const auto good = values;
    values[100] = bad;
    std::vector<float> error(values.size(), 0.0F);
    const std::vector<float> decoded = step(values, error);
    EXPECT_FALSE(std::isfinite(decoded[100]));
    for (const float kept : error) EXPECT_TRUE(std::isfinite(kept));
    EXPECT_EQ(error[100], 0.0F);
    for (const float value : step(good, error)) EXPECT_TRUE(std::isfinite(value));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ErrorFeedback,
                         testing::Combine(testing::ValuesIn(supported_isas()),
                                          testing::ValuesIn(kLossyCodecs)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace tradewind
