// The row of norm blocks that a parallel region is cut from, and the order of sums.
#include "step/blocks.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "base/split_mix.h"
#include "step/lanes.h"
#include "step/measure_reference.h"

namespace tradewind {
namespace {

std::vector<SweepSlot> slots_of(const std::vector<std::int64_t>& lengths) {
  std::vector<SweepSlot> slots(lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i) slots[i].num_elements = lengths[i];
  return slots;
}

using Part = std::tuple<std::size_t, std::int64_t, std::int64_t>;

std::vector<Part> parts_of(const std::vector<std::int64_t>& lengths, std::int64_t begin,
                           std::int64_t end) {
  const std::vector<SweepSlot> slots = slots_of(lengths);
  std::vector<std::int64_t> first_block{7, 7, 7};  // what another table left
  number_blocks(slots, first_block);
  std::vector<Part> parts;
  visit_blocks(first_block, begin, end, slots,
               [&](std::size_t slot_idx, std::int64_t first, std::int64_t count) {
                 parts.emplace_back(slot_idx, first, count);
               });
  return parts;
}

TEST(Blocks, AreNumberedThroughAllSlots) {
  std::vector<std::int64_t> first_block;
  number_blocks(slots_of({0, 1, 4096, 4097, 0}), first_block);
  EXPECT_EQ(first_block, (std::vector<std::int64_t>{0, 0, 1, 2, 4, 4}));
  number_blocks({}, first_block);
  EXPECT_EQ(first_block, (std::vector<std::int64_t>{0}));
}

TEST(Blocks, AreVisitedBySlotWithTheTailCutShort) {
  EXPECT_EQ(parts_of({0, 5000, 0, 3, 0}, 0, 3), (std::vector<Part>{{1, 0, 5000}, {3, 0, 3}}));
  EXPECT_EQ(parts_of({0, 5000, 0, 3, 0}, 1, 3), (std::vector<Part>{{1, 4096, 904}, {3, 0, 3}}));
  EXPECT_EQ(parts_of({0, 5000, 0, 3, 0}, 0, 1), (std::vector<Part>{{1, 0, 4096}}));
  EXPECT_EQ(parts_of({0, 5000, 0, 3, 0}, 2, 3), (std::vector<Part>{{3, 0, 3}}));
  EXPECT_EQ(parts_of({0, 5000}, 1, 1), std::vector<Part>{});
  const std::int64_t many = (std::int64_t{1} << 33) + 1;
  EXPECT_EQ(parts_of({many}, (many - 1) / 4096, num_norm_blocks(many)),
            (std::vector<Part>{{0, many - 1, 1}}));
}

TEST(Blocks, EveryCutVisitsEveryElementOnce) {
  SplitMix random(8);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = random.below(9); i >= 0; --i) {
      lengths.push_back(random.below(3) == 0 ? 0 : random.below(20'000));
    }
    std::vector<std::int64_t> next(lengths.size());
    std::int64_t total = 0;
    for (const std::int64_t length : lengths) total += num_norm_blocks(length);
    for (std::int64_t begin = 0; begin < total;) {
      const std::int64_t end = std::min(total, begin + 1 + random.below(5));
      for (const auto& [slot_idx, first, count] : parts_of(lengths, begin, end)) {
        ASSERT_EQ(first, next[slot_idx]);
        ASSERT_EQ(first % kNormBlockElements, 0);
        ASSERT_GT(count, 0);
        next[slot_idx] += count;
      }
      begin = end;
    }
    ASSERT_EQ(next, lengths);
  }
}

TEST(Blocks, ANullPointerStaysNull) {
  EXPECT_EQ(advance_bytes(static_cast<void*>(nullptr), 4096), nullptr);
  std::int32_t values[3] = {};
  EXPECT_EQ(advance_bytes(static_cast<void*>(values), 8), &values[2]);
  EXPECT_EQ(advance_bytes(static_cast<const void*>(values), 8), &values[2]);
}

TEST(Lanes, SumInTheContractsOrder) {
  SplitMix random(9);
  for (std::size_t count = 0; count <= 200; ++count) {
    std::vector<double> numbers(count);
    for (double& number : numbers) number = random.uniform();
    EXPECT_EQ(sum_in_lanes(static_cast<std::int64_t>(count),
                           [&](std::int64_t i) { return numbers[static_cast<std::size_t>(i)]; }),
              reference_lane_sum(numbers));
  }
}

TEST(Lanes, AreHalvedFiveTimes) {
  // Where halves were taken in another order, 1 would be lost beside the large ones, or kept.
  float lanes[kLanes] = {};
  lanes[0] = 0x1p24F;
  lanes[1] = 1.0F;
  lanes[16] = 1.0F;   // added to lane 0 first: lost
  lanes[17] = -1.0F;  // cancels lane 1
  EXPECT_EQ(halve_lanes(lanes), 0x1p24F);
  float pairs[kLanes] = {};
  pairs[0] = 0x1p24F;
  pairs[8] = 1.0F;
  pairs[24] = 1.0F;  // joins lane 8 before that joins lane 0: kept
  EXPECT_EQ(halve_lanes(pairs), 0x1p24F + 2.0F);
}

}  // namespace
}  // namespace tradewind
