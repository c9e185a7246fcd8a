#include <gtest/gtest.h>

#include <set>

#include "arena/layout.h"
#include "arena/random_layout.h"

namespace tradewind {
namespace {

constexpr std::int64_t kWorldSizes[] = {1, 2, 3, 4, 7, 8, 16, 61, 256, 1000};

// Where a shard may begin or end: at norm blocks of the bucket's slots, or where the bucket does.
std::set<std::int64_t> allowed_cuts(const Layout& layout, const Bucket& bucket) {
  std::set<std::int64_t> cuts{bucket.range.begin_bytes, bucket.range.end_bytes};
  const auto& members = layout.arena_slots(bucket.arena_idx);
  for (std::int64_t i = 0; i < bucket.num_slots; ++i) {
    const auto idx = members[static_cast<std::size_t>(bucket.first_slot_idx + i)];
    const Slot& slot = layout.slots()[static_cast<std::size_t>(idx)];
    for (std::int64_t block = 0; block < num_norm_blocks(slot.num_elements); ++block) {
      cuts.insert(slot.offset_bytes + block * kNormBlockElements * element_bytes(slot.dtype));
    }
  }
  return cuts;
}

void check_shards(const Layout& layout, std::int64_t bucket_idx, std::int64_t world_size) {
  const Bucket& bucket = layout.buckets()[static_cast<std::size_t>(bucket_idx)];
  const std::set<std::int64_t> cuts = allowed_cuts(layout, bucket);
  std::int64_t end_bytes = bucket.range.begin_bytes;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    const ByteRange shard = layout.shard(bucket_idx, rank, world_size);
    ASSERT_EQ(shard.begin_bytes, end_bytes);
    ASSERT_GE(shard.size_bytes(), 0);
    ASSERT_TRUE(cuts.contains(shard.begin_bytes)) << shard.begin_bytes;
    end_bytes = shard.end_bytes;
  }
  ASSERT_EQ(end_bytes, bucket.range.end_bytes);
}

TEST(Shard, AllRanksPartitionEveryBucketAtNormBlocks) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts / 4; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    for (std::size_t idx = 0; idx < layout.buckets().size(); ++idx) {
      for (const std::int64_t world_size : kWorldSizes) {
        check_shards(layout, static_cast<std::int64_t>(idx), world_size);
        ASSERT_FALSE(testing::Test::HasFatalFailure()) << "seed " << seed << " of " << world_size;
      }
    }
  }
}

// Blocks of one size: what every rank gets differs by one block at most.
TEST(Shard, RanksGetEvenParts) {
  const std::int64_t block_bytes = kNormBlockElements * 4;
  const Layout layout = Layout::make({{"a", {29 * kNormBlockElements}, DType::kFloat32}});
  for (const std::int64_t world_size : kWorldSizes) {
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      const std::int64_t bytes = layout.shard(0, rank, world_size).size_bytes();
      EXPECT_GE(bytes, 29 / world_size * block_bytes);
      EXPECT_LE(bytes, (29 / world_size + 1) * block_bytes);
    }
  }
}

TEST(Shard, OneRankHasTheWholeBucket) {
  const Layout layout =
      Layout::make({{"e", {0}}, {"a", {5000}}, {"b", {3}}, {"f", {0}}}, LayoutOptions{});
  EXPECT_EQ(layout.shard(0, 0, 1), layout.buckets()[0].range);
}

TEST(Shard, ABucketOfEmptySlotsHasEmptyShards) {
  const Layout layout = Layout::make({{"e", {0}}, {"f", {0, 7}}});
  for (const std::int64_t world_size : kWorldSizes) check_shards(layout, 0, world_size);
}

}  // namespace
}  // namespace tradewind
