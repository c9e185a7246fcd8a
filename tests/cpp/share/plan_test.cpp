#include "share/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "arena/random_layout.h"
#include "base/error_matching.h"

namespace tradewind {
namespace {

constexpr int kWorldSizes[] = {1, 2, 3, 4, 7, 8, 16, 61, 256, 1000};

struct Case {
  Layout layout;
  Plan plan;
  PlanOptions options;
  std::int64_t slot_alignment_bytes;

  [[nodiscard]] const Slot& slot(std::int64_t idx) const {
    return layout.slots()[static_cast<std::size_t>(idx)];
  }
  // Without its alignment at the end.
  [[nodiscard]] std::int64_t bytes_of(const PlanBucket& bucket) const {
    const Slot& last = slot(bucket.slots.back());
    return last.offset_bytes + last.size_bytes() - slot(bucket.slots.front()).offset_bytes;
  }
};

// Caps from a byte to more than everything.
Case random_case(std::uint64_t seed, int world_size) {
  const LayoutInput input = random_layout_input(seed);
  SplitMix random(seed + 1000);
  PlanOptions options;
  options.bucket_bytes = std::int64_t{1} << random.below(22);
  options.end_bucket_bytes = std::int64_t{1} << random.below(20);
  options.piece_bytes = std::int64_t{1} << random.below(22);
  Layout layout = Layout::make(input.specs, input.options);
  Plan plan = Plan::make(layout, world_size, options);
  return {std::move(layout), std::move(plan), options, input.options.slot_alignment_bytes};
}

template <class Check>
void for_random_cases(const Check& check) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts / 2; ++seed) {
    for (const int world_size : kWorldSizes) {
      check(random_case(seed, world_size));
      ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed << " of " << world_size;
    }
  }
}

void check_cuts(const Case& made) {
  std::vector<std::int64_t> num_covered(made.layout.slots().size());
  for (const PlanPiece& piece : made.plan.pieces()) {
    ASSERT_EQ(piece.cuts.size(), static_cast<std::size_t>(made.plan.world_size()) + 1);
    for (std::size_t rank = 0; rank + 1 < piece.cuts.size(); ++rank) {
      for (const SlotRun& run : runs_between(made.layout, piece.cuts[rank], piece.cuts[rank + 1])) {
        std::int64_t& covered = num_covered[static_cast<std::size_t>(run.slot_idx)];
        ASSERT_EQ(run.begin, covered);  // pieces of a bucket, and ranks of a piece, in order
        ASSERT_EQ(run.begin % kNormBlockElements, 0);
        ASSERT_GT(run.end, run.begin);
        ASSERT_EQ(made.plan.bucket_of(run.slot_idx), piece.bucket_idx);
        covered = run.end;
      }
    }
  }
  for (std::size_t s = 0; s < num_covered.size(); ++s) {
    ASSERT_EQ(num_covered[s], made.layout.slots()[s].num_elements);
    ASSERT_EQ(made.plan.bucket_of(static_cast<std::int64_t>(s)) < 0, num_covered[s] == 0);
  }
}

TEST(Plan, PiecesCoverEveryElementOnceAndAreCutAtNormBlocks) { for_random_cases(check_cuts); }

void check_order(const Case& made) {
  std::int32_t next_piece = 0, next_arena = 0;
  std::vector<std::vector<std::int64_t>> slots(made.layout.arenas().size());
  for (const PlanBucket& bucket : made.plan.buckets()) {
    ASSERT_EQ(bucket.first_piece_idx, next_piece);
    ASSERT_GE(bucket.num_pieces, 1);
    ASSERT_GE(bucket.arena_idx, next_arena);
    next_piece += bucket.num_pieces;
    next_arena = bucket.arena_idx;
    auto& seen = slots[static_cast<std::size_t>(bucket.arena_idx)];
    seen.insert(seen.begin(), bucket.slots.begin(), bucket.slots.end());
  }
  ASSERT_EQ(static_cast<std::size_t>(next_piece), made.plan.pieces().size());
  for (std::size_t arena = 0; arena < slots.size(); ++arena) {
    std::vector<std::int64_t> expected = made.layout.arena_slots(static_cast<std::int32_t>(arena));
    std::erase_if(expected, [&](std::int64_t idx) { return made.slot(idx).num_elements == 0; });
    ASSERT_EQ(slots[arena], expected);
  }
}

TEST(Plan, BucketsHoldTheLastSlotsFirst) { for_random_cases(check_order); }

// A bucket is full with the slot that brings it to its size; the last one ends before it would be.
void check_bucket_sizes(const Case& made) {
  const auto& buckets = made.plan.buckets();
  for (std::size_t idx = 0; idx < buckets.size(); ++idx) {
    const PlanBucket& bucket = buckets[idx];
    const bool is_first = idx == 0 || buckets[idx - 1].arena_idx != bucket.arena_idx;
    const bool is_last =
        idx + 1 == buckets.size() || buckets[idx + 1].arena_idx != bucket.arena_idx;
    if (is_last) {
      ASSERT_TRUE(bucket.slots.size() == 1 ||
                  made.bytes_of(bucket) <= made.options.end_bucket_bytes);
    }
    const std::int64_t cap =
        is_first ? made.options.end_bucket_bytes
                 : std::max(made.options.bucket_bytes, made.options.end_bucket_bytes);
    if (bucket.slots.size() == 1) continue;
    PlanBucket without_last = bucket;
    without_last.slots.erase(without_last.slots.begin());
    ASSERT_LT(made.bytes_of(without_last), cap);
  }
}

TEST(Plan, BucketsAreNoLargerThanTheirLastSlotNeedsAndSmallAtBothEnds) {
  for_random_cases(check_bucket_sizes);
}

TEST(Plan, PiecesAreNoLargerThanTheirBound) {
  for_random_cases([](const Case& made) {
    for (const PlanPiece& piece : made.plan.pieces()) {
      const DType dtype = made.slot(piece.cuts.front().slot_idx).dtype;
      // Four blocks of float32 for each rank, or shards would differ too much.
      const std::int64_t smallest =
          made.plan.world_size() * 4 * kNormBlockElements * std::int64_t{sizeof(float)};
      // Each end moves by half a block to where it may be, or by the padding between two slots.
      const std::int64_t slack =
          kNormBlockElements * element_bytes(dtype) + made.slot_alignment_bytes;
      ASSERT_LE(range_between(made.layout, piece.cuts.front(), piece.cuts.back()).size_bytes(),
                std::max(made.options.piece_bytes, smallest) + slack);
    }
  });
}

// The same cuts in a layout of the same slots in other dtypes and alignments.
void check_second_layout(const Case& made) {
  std::vector<SlotSpec> specs;
  for (const Slot& slot : made.layout.slots()) {
    const int other = (static_cast<int>(slot.dtype) + 1) % kNumDTypes;
    specs.push_back({slot.name, slot.shape, static_cast<DType>(other)});
  }
  constexpr std::int64_t kAlignment = 128;
  const Layout second = Layout::make(specs, {.slot_alignment_bytes = kAlignment});
  for (const PlanPiece& piece : made.plan.pieces()) {
    std::int64_t end_bytes =
        range_between(second, piece.cuts.front(), piece.cuts.front()).begin_bytes;
    for (std::size_t rank = 0; rank + 1 < piece.cuts.size(); ++rank) {
      const ByteRange range = range_between(second, piece.cuts[rank], piece.cuts[rank + 1]);
      ASSERT_EQ(range.begin_bytes, end_bytes);
      const auto runs = runs_between(second, piece.cuts[rank], piece.cuts[rank + 1]);
      const auto firsts = runs_between(made.layout, piece.cuts[rank], piece.cuts[rank + 1]);
      ASSERT_EQ(runs.size(), firsts.size());
      std::int64_t offset_bytes = range.begin_bytes;
      for (std::size_t i = 0; i < runs.size(); ++i) {
        ASSERT_EQ(runs[i].slot_idx, firsts[i].slot_idx);
        ASSERT_EQ(runs[i].begin, firsts[i].begin);
        ASSERT_EQ(runs[i].end, firsts[i].end);
        const Slot& slot = second.slots()[static_cast<std::size_t>(runs[i].slot_idx)];
        const std::int64_t bytes = element_bytes(slot.dtype);
        const std::int64_t padding = slot.offset_bytes + runs[i].begin * bytes - offset_bytes;
        ASSERT_GE(padding, 0);
        ASSERT_LT(padding, i == 0 ? 1 : kAlignment);
        offset_bytes = slot.offset_bytes + runs[i].end * bytes;
      }
      ASSERT_GE(range.end_bytes, offset_bytes);
      ASSERT_LT(range.end_bytes - offset_bytes, kAlignment);
      end_bytes = range.end_bytes;
    }
  }
}

TEST(Plan, RunsAndRangesAgreeInALayoutOfOtherDtypes) { for_random_cases(check_second_layout); }

// Of a decoder: embeddings, layers of a few large and a few tiny slots, all layers alike.
Layout decoder(std::int64_t width, std::int64_t num_layers, DType dtype) {
  std::vector<SlotSpec> specs{{"embedding", {5003, width}, dtype}};
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    specs.push_back({name + ".norm", {width}, dtype});
    specs.push_back({name + ".qkv", {3 * width, width}, dtype});
    specs.push_back({name + ".qkv_bias", {3 * width}, dtype});
    specs.push_back({name + ".out", {width, width}, dtype});
    specs.push_back({name + ".up", {4 * width, width}, dtype});
    specs.push_back({name + ".down", {width, 4 * width}, dtype});
  }
  return Layout::make(specs);
}

// What each rank sends is what the others have of each piece, and its own shard to all others.
void expect_even(const Layout& layout, int world_size, const std::string& what) {
  const Plan plan = Plan::make(layout, world_size);
  std::vector<double> own(static_cast<std::size_t>(world_size));
  double all = 0.0;
  for (const PlanPiece& piece : plan.pieces()) {
    for (std::size_t rank = 0; rank < own.size(); ++rank) {
      const auto bytes = static_cast<double>(
          range_between(layout, piece.cuts[rank], piece.cuts[rank + 1]).size_bytes());
      own[rank] += bytes;
      all += bytes;
    }
  }
  ASSERT_GE(all, 64e6) << what;
  const double even = all * (world_size - 1) / world_size;
  for (std::size_t rank = 0; rank < own.size(); ++rank) {
    EXPECT_NEAR(all - own[rank], even, 0.02 * even) << what << ": first half of rank " << rank;
    EXPECT_NEAR(own[rank] * (world_size - 1), even, 0.02 * even)
        << what << ": second half of rank " << rank;
  }
}

TEST(Plan, RanksSendAlikeOverAWholePlan) {
  for (int world_size = 2; world_size <= 16; ++world_size) {
    const std::string what = "of " + std::to_string(world_size) + " ranks";
    expect_even(decoder(768, 3, DType::kFloat32), world_size, "768 wide, " + what);
    expect_even(decoder(500, 7, DType::kFloat32), world_size, "500 wide, " + what);
    expect_even(decoder(384, 12, DType::kFloat32), world_size, "384 wide, " + what);
    expect_even(decoder(640, 6, DType::kBFloat16), world_size, "bfloat16, " + what);
    expect_even(Layout::make({{"a", {16'777'217}, DType::kFloat32}}), world_size, "one, " + what);
  }
}

TEST(Plan, EmptySlotsTakeNoPart) {
  const Layout empty = Layout::make({{"e", {0}}, {"f", {3, 0}}});
  EXPECT_TRUE(Plan::make(empty, 3).buckets().empty());
  EXPECT_TRUE(Plan::make(empty, 3).pieces().empty());
  EXPECT_TRUE(Plan::make(Layout::make({}), 2).pieces().empty());

  const Layout layout = Layout::make({{"e", {0}}, {"a", {5000}}, {"f", {0}}, {"b", {3}}});
  const Plan plan = Plan::make(layout, 2);
  ASSERT_EQ(plan.buckets().size(), 1U);
  EXPECT_EQ(plan.buckets()[0].slots, (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(plan.bucket_of(0), -1);
  EXPECT_EQ(plan.bucket_of(1), 0);
}

TEST(Plan, MoreRanksThanBlocksLeaveSomeWithNothing) {
  const Layout layout = Layout::make({{"a", {2 * kNormBlockElements}}, {"b", {1}}});
  const Plan plan = Plan::make(layout, 1000);
  ASSERT_EQ(plan.pieces().size(), 1U);
  const PlanPiece& piece = plan.pieces()[0];
  std::int64_t num_owners = 0;
  for (std::size_t rank = 0; rank < 1000; ++rank) {
    if (!runs_between(layout, piece.cuts[rank], piece.cuts[rank + 1]).empty()) ++num_owners;
  }
  EXPECT_GE(num_owners, 2);
  EXPECT_LE(num_owners, 3);
}

TEST(Plan, ErrorsNameWhatIsWrong) {
  const Layout layout = Layout::make({{"a", {10}}});
  expect_error(ErrorKind::kBadValue, {"world size", "at least one rank", "got 0"},
               [&] { Plan::make(layout, 0); });
  expect_error(ErrorKind::kBadValue, {"world size", "got -3"}, [&] { Plan::make(layout, -3); });
  expect_error(ErrorKind::kBadValue, {"bucket_bytes", "positive", "got 0"},
               [&] { Plan::make(layout, 2, {.bucket_bytes = 0}); });
  expect_error(ErrorKind::kBadValue, {"end_bucket_bytes", "positive", "got -1"},
               [&] { Plan::make(layout, 2, {.end_bucket_bytes = -1}); });
  expect_error(ErrorKind::kBadValue, {"piece_bytes", "positive", "got 0"},
               [&] { Plan::make(layout, 2, {.piece_bytes = 0}); });
}

}  // namespace
}  // namespace tradewind
