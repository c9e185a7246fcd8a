#include <gtest/gtest.h>

#include "arena/layout.h"
#include "arena/random_layout.h"

namespace tradewind {
namespace {

const Slot& member(const Layout& layout, const Bucket& bucket, std::int64_t i) {
  const auto& members = layout.arena_slots(bucket.arena_idx);
  const auto slot_idx = members[static_cast<std::size_t>(bucket.first_slot_idx + i)];
  return layout.slots()[static_cast<std::size_t>(slot_idx)];
}

TEST(Bucket, EachSlotIsInExactlyOneAndRangesMeet) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    std::vector<std::int64_t> next_slot(layout.arenas().size(), 0);
    std::vector<std::int64_t> end_bytes(layout.arenas().size(), 0);
    for (const Bucket& bucket : layout.buckets()) {
      const auto arena = static_cast<std::size_t>(bucket.arena_idx);
      EXPECT_GT(bucket.num_slots, 0);
      EXPECT_EQ(bucket.first_slot_idx, next_slot[arena]);
      EXPECT_EQ(bucket.range.begin_bytes, end_bytes[arena]);
      next_slot[arena] += bucket.num_slots;
      end_bytes[arena] = bucket.range.end_bytes;
    }
    for (std::size_t arena = 0; arena < layout.arenas().size(); ++arena) {
      const auto& members = layout.arena_slots(static_cast<std::int32_t>(arena));
      EXPECT_EQ(next_slot[arena], static_cast<std::int64_t>(members.size()));
      EXPECT_LE(end_bytes[arena], layout.arenas()[arena].size_bytes);
    }
  }
}

TEST(Bucket, HoldsItsSlotsAndCountsTheirNormBlocks) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    for (const Bucket& bucket : layout.buckets()) {
      std::int64_t num_blocks = 0;
      for (std::int64_t i = 0; i < bucket.num_slots; ++i) {
        const Slot& slot = member(layout, bucket, i);
        EXPECT_GE(slot.offset_bytes, bucket.range.begin_bytes);
        EXPECT_LE(slot.offset_bytes + slot.size_bytes(), bucket.range.end_bytes);
        num_blocks += num_norm_blocks(slot.num_elements);
      }
      EXPECT_EQ(bucket.num_norm_blocks, num_blocks);
    }
  }
}

// Up to the end of its last slot; the range behind it is padding to the slot alignment.
std::int64_t payload_bytes(const Layout& layout, const Bucket& bucket) {
  const Slot& last = member(layout, bucket, bucket.num_slots - 1);
  return last.offset_bytes + last.size_bytes() - bucket.range.begin_bytes;
}

TEST(Bucket, KeepsTheCapUnlessOneSlotIsLarger) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    for (const Bucket& bucket : layout.buckets()) {
      EXPECT_LT(bucket.range.size_bytes() - payload_bytes(layout, bucket),
                input.options.slot_alignment_bytes);
      if (payload_bytes(layout, bucket) <= input.options.bucket_bytes) continue;
      EXPECT_GT(member(layout, bucket, 0).size_bytes(), input.options.bucket_bytes);
      EXPECT_EQ(bucket.num_slots, 1);
    }
  }
}

TEST(Bucket, IsNotClosedWhileTheNextSlotFits) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    for (std::size_t i = 0; i + 1 < layout.buckets().size(); ++i) {
      const Bucket& bucket = layout.buckets()[i];
      const Bucket& next = layout.buckets()[i + 1];
      if (next.arena_idx != bucket.arena_idx) continue;
      const Slot& refused = member(layout, next, 0);
      EXPECT_GT(refused.offset_bytes + refused.size_bytes() - bucket.range.begin_bytes,
                input.options.bucket_bytes);
    }
  }
}

TEST(Bucket, AnEmptyLastSlotJoinsTheLastBucket) {
  const Layout layout =
      Layout::make({{"a", {64}, DType::kFloat32}, {"empty", {0}, DType::kFloat32}});
  ASSERT_EQ(layout.buckets().size(), 1U);
  EXPECT_EQ(layout.buckets()[0].num_slots, 2);
  EXPECT_EQ(layout.buckets()[0].range, (ByteRange{0, 256}));
}

}  // namespace
}  // namespace tradewind
