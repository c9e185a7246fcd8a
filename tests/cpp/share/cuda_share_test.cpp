// Sharing's CUDA kernels over the emulated grid, against the CPU's: every bit of wires, errors and
// numbers, wherever a run ends and however it is aligned.
#include <gtest/gtest.h>

#include <string>

#include "cuda_emulation/grid.h"
#include "share/cuda/interface.h"
#include "share/kernels.h"
#include "share/share_values.h"

namespace tradewind {
namespace {

constexpr std::size_t kLengths[] = {1,   2,   3,   4,    5,    31,   32,   33,  127,
                                    128, 129, 509, 511,  512,  513,  514,  516, 639,
                                    640, 641, 700, 1023, 1024, 1025, 4096, 5001};

class CudaShare : public testing::TestWithParam<Codec> {
 protected:
  void SetUp() override {
    cuda_emulation::failure().clear();
    cuda_emulation::counts() = {};
    cuda_emulation::set_order(0);
  }
  void TearDown() override { EXPECT_EQ(cuda_emulation::failure(), ""); }

  [[nodiscard]] Codec codec() const { return GetParam(); }
  [[nodiscard]] bool is_lossy() const { return codec() != Codec::kNone; }
  template <class Type>
  [[nodiscard]] TradewindCudaRun run_of(std::size_t length) const {
    return {static_cast<std::int64_t>(length), static_cast<int>(codec()),
            static_cast<int>(Type::kDType)};
  }
  template <class Type>
  [[nodiscard]] FencedArray<std::uint32_t> wire_for(std::size_t length) const {
    return FencedArray<std::uint32_t>(
        static_cast<std::size_t>(
            wire_bytes(codec(), Type::kDType, static_cast<std::int64_t>(length))) /
        4);
  }
  template <class Type>
  [[nodiscard]] EncodeKernel cpu_encode() const {
    return share_kernels_for("baseline")
        .encode[static_cast<int>(codec())][static_cast<int>(Type::kDType)];
  }

  template <class Check>
  void for_dtypes(const Check& check) const {
    for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
      if (!takes(codec(), static_cast<DType>(dtype))) continue;
      visit_format(static_cast<DType>(dtype), check);
      if (HasFatalFailure()) return;
    }
  }

  template <class Type>
  void check_encode(Sample sample, std::size_t length, bool has_error) const {
    FencedArray<typename Type::Stored> values(share_values<Type>(sample, length, length));
    const std::vector<float> before = share_values<Float32Format>(Sample::kOrdinary, 77, length);
    FencedArray<float> cpu_error(before);
    FencedArray<float> error(before);
    FencedArray<std::uint32_t> cpu_wire = wire_for<Type>(length);
    FencedArray<std::uint32_t> wire = wire_for<Type>(length);
    cpu_encode<Type>()(values.data(), static_cast<std::int64_t>(length),
                       has_error ? cpu_error.data() : nullptr, wire_of(cpu_wire));
    const TradewindCudaRun run = run_of<Type>(length);
    ASSERT_EQ(tradewind_cuda_encode(&run, values.data(), has_error ? error.data() : nullptr,
                                    wire.data(), nullptr),
              0)
        << cuda_emulation::failure();
    ASSERT_TRUE(wire.guards_are_intact() && error.guards_are_intact());
    ASSERT_EQ(bytes_of(wire), bytes_of(cpu_wire));
    ASSERT_EQ(std::memcmp(error.data(), cpu_error.data(), 4 * length), 0);
  }

  template <class Type>
  void check_decode(Sample sample, std::size_t length) const {
    FencedArray<std::uint32_t> wire = fenced_wire(
        WireReference(codec()).encode(as_floats<Type>(share_values<Type>(sample, length, length))));
    FencedArray<typename Type::Stored> expected(length);
    FencedArray<typename Type::Stored> got(length);
    share_kernels_for("baseline")
        .decode[static_cast<int>(codec())][static_cast<int>(Type::kDType)](
            wire_of(wire), static_cast<std::int64_t>(length), expected.data());
    const TradewindCudaRun run = run_of<Type>(length);
    ASSERT_EQ(tradewind_cuda_decode(&run, wire.data(), got.data(), nullptr), 0)
        << cuda_emulation::failure();
    ASSERT_TRUE(got.guards_are_intact());
    for (std::size_t i = 0; i < length; ++i) {
      ASSERT_TRUE(same_value<Type>(expected.data()[i], got.data()[i])) << i;
    }
  }

  // Parts of values and, of every codec but none, wires; written over part `own` or elsewhere.
  template <class Type>
  void check_sum(std::size_t length, std::size_t num_parts, double divisor, int own) const {
    std::vector<FencedArray<typename Type::Stored>> values;
    std::vector<FencedArray<std::uint32_t>> wires;
    std::vector<SumPart> cpu_parts;
    std::vector<TradewindCudaPart> parts;
    for (std::size_t p = 0; p < num_parts; ++p) {
      const auto stored = share_values<Type>(kSamples[p % 5], 10 * p + length, length);
      const bool is_values = !is_lossy() || p % 2 == 0;
      values.emplace_back(stored);
      wires.push_back(is_values
                          ? FencedArray<std::uint32_t>(0)
                          : fenced_wire(WireReference(codec()).encode(as_floats<Type>(stored))));
      const void* data = is_values ? static_cast<const void*>(values.back().data())
                                   : static_cast<const void*>(wires.back().data());
      cpu_parts.push_back({data, is_values});
      parts.push_back({data, is_values ? 1 : 0});
    }
    FencedArray<typename Type::Stored> expected(length);
    FencedArray<typename Type::Stored> elsewhere(length);
    share_kernels_for("baseline")
        .sum[static_cast<int>(codec())][static_cast<int>(Type::kDType)](
            cpu_parts.data(), static_cast<std::int64_t>(num_parts),
            static_cast<std::int64_t>(length), divisor, expected.data());
    FencedArray<typename Type::Stored>& got =
        own < 0 ? elsewhere : values[static_cast<std::size_t>(own)];
    const TradewindCudaRun run = run_of<Type>(length);
    ASSERT_EQ(tradewind_cuda_sum(&run, parts.data(), static_cast<std::int64_t>(num_parts), divisor,
                                 got.data(), nullptr),
              0)
        << cuda_emulation::failure();
    ASSERT_TRUE(got.guards_are_intact());
    for (std::size_t i = 0; i < length; ++i) {
      ASSERT_TRUE(same_value<Type>(expected.data()[i], got.data()[i])) << i;
    }
  }
};

TEST_P(CudaShare, EncodeHasTheCpusBits) {
  if (!is_lossy()) GTEST_SKIP() << "there is nothing to encode";
  for_dtypes([&]<class Type>() {
    for (const Sample sample : kSamples) {
      for (const std::size_t length : kLengths) {
        for (const bool has_error : {false, true}) {
          cuda_emulation::set_order(length % 3);
          check_encode<Type>(sample, length, has_error);
          if (HasFatalFailure()) FAIL() << dtype_name(Type::kDType) << ", length " << length;
        }
      }
    }
  });
}

TEST_P(CudaShare, EncodeHasTheCpusBitsForEveryMagnitude) {
  if (!is_lossy()) GTEST_SKIP() << "there is nothing to encode";
  constexpr std::size_t kLength = 4;
  for (int exponent = -149; exponent < 128; ++exponent) {
    for (const float part : {1.0F, 1.5F, 0x1.FFCp0F, 0x1.FFDFFEp0F, 0x1.FFEp0F, 0x1.FFFFFEp0F}) {
      const float largest = std::ldexp(part, exponent);
      const std::vector<float> values{largest, -largest, 0.3F * largest, 0.004F * largest};
      FencedArray<std::uint32_t> cpu_wire = wire_for<Float32Format>(kLength);
      FencedArray<std::uint32_t> wire = wire_for<Float32Format>(kLength);
      cpu_encode<Float32Format>()(values.data(), kLength, nullptr, wire_of(cpu_wire));
      const TradewindCudaRun run = run_of<Float32Format>(kLength);
      ASSERT_EQ(tradewind_cuda_encode(&run, values.data(), nullptr, wire.data(), nullptr), 0);
      ASSERT_EQ(bytes_of(wire), bytes_of(cpu_wire)) << largest;
    }
  }
}

TEST_P(CudaShare, DecodeHasTheCpusBits) {
  if (!is_lossy()) GTEST_SKIP() << "there is nothing to decode";
  for_dtypes([&]<class Type>() {
    for (const Sample sample : kSamples) {
      for (const std::size_t length : kLengths) {
        check_decode<Type>(sample, length);
        if (HasFatalFailure()) FAIL() << dtype_name(Type::kDType) << ", length " << length;
      }
    }
  });
}

TEST_P(CudaShare, SumsHaveTheCpusBits) {
  for_dtypes([&]<class Type>() {
    for (const std::size_t length : kLengths) {
      for (const int num_parts : {1, 2, 5}) {
        cuda_emulation::set_order(length % 3);
        const double divisor = num_parts == 2 ? 1.0 : 3.0;
        check_sum<Type>(length, static_cast<std::size_t>(num_parts), divisor, -1);
        check_sum<Type>(length, static_cast<std::size_t>(num_parts), divisor, num_parts / 4 * 2);
        if (HasFatalFailure()) FAIL() << dtype_name(Type::kDType) << ", length " << length;
      }
    }
  });
}

TEST_P(CudaShare, WhatACodecDoesNotTakeIsAnswered) {
  constexpr int kInvalidValue = 1;
  float value = 0.0F;
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    const bool is_taken = takes(codec(), static_cast<DType>(dtype));
    const TradewindCudaRun run{0, static_cast<int>(codec()), dtype};
    const int sums = tradewind_cuda_sum(&run, nullptr, 0, 1.0, &value, nullptr);
    EXPECT_EQ(sums, is_taken ? 0 : kInvalidValue) << dtype;
    const int expected = is_taken && is_lossy() ? 0 : kInvalidValue;
    EXPECT_EQ(tradewind_cuda_encode(&run, &value, nullptr, &value, nullptr), expected) << dtype;
    EXPECT_EQ(tradewind_cuda_decode(&run, &value, &value, nullptr), expected) << dtype;
  }
  EXPECT_EQ(cuda_emulation::counts().launches, 0);
}

// Values are read once, the wire written once, by one kernel.
TEST_P(CudaShare, EncodeMovesEachByteOnce) {
  if (!is_lossy()) GTEST_SKIP() << "there is nothing to encode";
  const auto values = share_values<Float32Format>(Sample::kOrdinary, 1, 5001);
  std::vector<float> error(values.size(), 0.0F);
  FencedArray<std::uint32_t> wire = wire_for<Float32Format>(values.size());
  const auto num_bytes = static_cast<std::int64_t>(4 * values.size());
  const TradewindCudaRun run = run_of<Float32Format>(values.size());
  ASSERT_EQ(tradewind_cuda_encode(&run, values.data(), error.data(), wire.data(), nullptr), 0);
  EXPECT_EQ(cuda_emulation::counts().launches, 1);
  EXPECT_EQ(cuda_emulation::counts().loaded_bytes, 2 * num_bytes);
  EXPECT_EQ(cuda_emulation::counts().stored_bytes,
            num_bytes + wire_bytes(codec(), DType::kFloat32, run.num_elements));
}

INSTANTIATE_TEST_SUITE_P(All, CudaShare,
                         testing::Values(Codec::kNone, Codec::kBfloat16, Codec::kFloat16,
                                         Codec::kInt8),
                         [](const auto& info) { return std::string(name_of(info.param)); });

static_assert(sizeof(TradewindCudaPart) == 16 && sizeof(TradewindCudaRun) == 16);

TEST(CudaShareInterface, HasItsVersion) {
  EXPECT_EQ(tradewind_cuda_share_version(), TRADEWIND_CUDA_SHARE_VERSION);
}

}  // namespace
}  // namespace tradewind
