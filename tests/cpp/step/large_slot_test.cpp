// Slots of more than 2^31 elements. Their arrays are one piece of memory mapped again and again, so
// an update by a whole number is counted: the piece must have moved once for every place it has.
#include <gtest/gtest.h>

#include <memory>
#include <string_view>
#include <vector>

#include "step/random_formats.h"
#include "step/repeated_mapping.h"
#include "step/rule_options.h"
#include "step/sweep.h"

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace tradewind {
namespace {

constexpr std::int64_t kTail = 3 * 4096 + 1;
constexpr std::int64_t kBody = std::int64_t{1} << 31;

std::unique_ptr<RepeatedMapping> large_array(std::int64_t element_bytes) {
  const std::int64_t body_bytes = kBody * element_bytes;
  return std::make_unique<RepeatedMapping>(
      static_cast<std::size_t>(body_bytes) / RepeatedMapping::kPieceBytes,
      static_cast<std::size_t>(kTail * element_bytes));
}

constexpr double num_places(std::int64_t element_bytes) {
  return static_cast<double>(kBody * element_bytes) / double{RepeatedMapping::kPieceBytes};
}

// All blocks but the last three, then those: both a range that is longer than 2^31 elements and one
// that begins behind them.
constexpr Parallel kLastBlocksApart{
    [](std::int64_t total, std::int64_t, void* context, RangeBody body) {
      body(context, 0, total - 3);
      body(context, total - 3, total);
    }};

SweepSlot large_slot(DType dtype, std::string_view rule) {
  SweepSlot slot;
  slot.dtype = dtype;
  slot.gradient_dtype = dtype;
  slot.num_elements = kBody + kTail;
  slot.rule_idx = find_rule(rule);
  return slot;
}

void sweep_once(const SweepSlot& slot, const std::vector<double>& options, double multiplier) {
  const ScalarBlock scalars =
      scalars_for(rules()[static_cast<std::size_t>(slot.rule_idx)], slot.dtype, options, 1, true);
  Sweep sweep;
  sweep.run({&slot, 1}, {&scalars, 1}, {.gradient_multiplier = multiplier}, kernels(),
            kLastBlocksApart);
}

TEST(LargeSlot, EveryElementIsMeasured) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    visit_format(dtype, [&]<class Type>() {
      using Stored = typename Type::Stored;
      const auto gradient = large_array(sizeof(Stored));
      gradient->fill<Stored>(Type::encode(1.0));
      gradient->tail<Stored>()[0] = Type::encode(0.0);
      gradient->tail<Stored>()[kTail - 1] = Type::encode(-3.0);
      SweepSlot slot = large_slot(dtype, "sgd");
      slot.gradient = gradient->data<void>();
      Measure measure;
      measure.begin({&slot, 1});
      measure.run(kernels(), kLastBlocksApart);
      // Whole numbers below 2^53: any order adds them exactly.
      EXPECT_EQ(measure.sum_of_squares(), static_cast<double>(kBody + kTail - 2 + 9));
      EXPECT_EQ(measure.slots()[0].max_abs, 3.0);
      EXPECT_EQ(measure.slots()[0].num_zeros, 1);
      EXPECT_EQ(measure.num_nonfinite(), 0);
    });
  }
}

TEST(LargeSlot, EveryElementOfPlainArraysIsUpdatedOnce) {
  const auto parameter = large_array(4);
  const auto gradient = large_array(4);
  parameter->fill(5.0F);
  gradient->fill(1.0F);
  gradient->tail<float>()[kTail - 1] = 2.0F;
  SweepSlot slot = large_slot(DType::kFloat32, "sgd");
  slot.parameter = parameter->data<void>();
  slot.gradient = gradient->data<void>();
  sweep_once(slot, {1.0, 0.0, 0.0, 0.0, 0.0}, 1.0);
  constexpr auto kExpected = static_cast<float>(5.0 - num_places(4));
  for (std::size_t i = 0; i < RepeatedMapping::kPieceBytes / 4; ++i) {
    ASSERT_EQ(parameter->data<float>()[i], kExpected) << i;
  }
  for (std::int64_t i = 0; i < kTail; ++i) {
    ASSERT_EQ(parameter->tail<float>()[i], i == kTail - 1 ? 3.0F : 4.0F) << i;
  }
}

// Through every conversion: a split master counts exactly, and the state, which holds the gradient
// alone on the first step, shows what an element beyond 2^31 rounds with.
TEST(LargeSlot, EveryElementOfStoredArraysIsUpdatedOnceAndRoundsByItsOwnNumber) {
  const auto parameter = large_array(2);
  const auto low = large_array(2);
  const auto gradient = large_array(2);
  const auto state = large_array(2);
  parameter->fill<std::uint16_t>(0x0000);
  low->fill<std::uint16_t>(0);
  gradient->fill<std::uint16_t>(BFloat16Format::encode(-1.0));
  state->fill<std::uint16_t>(0x0000);
  SweepSlot slot = large_slot(DType::kBFloat16, "sgd_momentum");
  slot.master = Master::kSplit;
  slot.parameter = parameter->data<void>();
  slot.master_data = low->data<void>();
  slot.gradient = gradient->data<void>();
  slot.states[0] = state->data<void>();
  slot.state_formats[0] = Format::kStochasticBFloat16;
  slot.random_key = 0x5EED;
  constexpr float kStep = 1.0F + 0x1p-9F;  // a quarter of the way between two bfloat16 values
  sweep_once(slot, {1.0, 0.0, 0.0, 0.0, 0.0}, kStep);
  // Multiples of 2^-9 below 2^15: exact in float32.
  const ReferenceSplit moved = reference_split(static_cast<float>(num_places(2)) * kStep);
  for (std::size_t i = 0; i < RepeatedMapping::kPieceBytes / 2; ++i) {
    ASSERT_EQ(parameter->data<std::uint16_t>()[i], moved.high) << i;
    ASSERT_EQ(low->data<std::uint16_t>()[i], moved.low) << i;
  }
  const ReferenceSplit once = reference_split(kStep);
  std::int64_t num_up = 0;
  for (std::int64_t i = 0; i < kTail; ++i) {
    ASSERT_EQ(parameter->tail<std::uint16_t>()[i], once.high) << i;
    ASSERT_EQ(low->tail<std::uint16_t>()[i], once.low) << i;
    const std::uint32_t half = random_half(random_bits(slot.random_key, kBody + i), 0);
    ASSERT_EQ(state->tail<std::uint16_t>()[i], reference_stochastic(-kStep, half)) << i;
    num_up += state->tail<std::uint16_t>()[i] == BFloat16Format::encode(-1.0) ? 0 : 1;
  }
  // Some of each, or the comparison would show nothing.
  EXPECT_GT(num_up, kTail / 8);
  EXPECT_LT(num_up, kTail / 2);
}

TEST(LargeSlot, ExponentsOfBlockwiseStatesLieByTheirBlock) {
  const auto parameter = large_array(4);
  const auto gradient = large_array(4);
  const auto state = large_array(1);
  constexpr std::int64_t kNumExponents = num_exponent_blocks(kBody + kTail);
  std::vector<std::uint8_t> exponents(static_cast<std::size_t>(kNumExponents), 77);
  parameter->fill(0.0F);
  gradient->fill(1.0F);
  gradient->tail<float>()[kTail - 1] = 0x1p20F;
  state->fill<std::uint8_t>(0);
  SweepSlot slot = large_slot(DType::kFloat32, "sgd_momentum");
  slot.parameter = parameter->data<void>();
  slot.gradient = gradient->data<void>();
  slot.states[0] = state->data<void>();
  slot.state_formats[0] = Format::kSigned8;
  slot.exponents[0] = exponents.data();
  sweep_once(slot, {1.0, 0.0, 0.0, 0.0, 0.0}, 1.0);
  const std::uint8_t of_one = BlockReference<true>::block_exponent(1.0F);
  for (std::size_t i = 0; i + 1 < exponents.size(); ++i) ASSERT_EQ(exponents[i], of_one) << i;
  EXPECT_EQ(exponents.back(), of_one + 20);
  for (std::int64_t i = 0; i + 1 < kTail; ++i) {
    ASSERT_EQ(BlockReference<true>::decode(state->tail<std::uint8_t>()[i], of_one), 1.0) << i;
  }
  EXPECT_EQ(BlockReference<true>::decode(state->tail<std::uint8_t>()[kTail - 1], of_one + 20),
            0x1p20);
}

}  // namespace
}  // namespace tradewind

#else

TEST(LargeSlot, Arrays) { GTEST_SKIP() << "memory is mapped repeatedly on Linux, unsanitized"; }

#endif
