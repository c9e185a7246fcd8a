#include <gtest/gtest.h>

#include <limits>

#include "arena/layout.h"
#include "base/error_matching.h"

namespace tradewind {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

void expect_refused(std::initializer_list<std::string> parts, const std::vector<SlotSpec>& specs,
                    const LayoutOptions& options = {}) {
  expect_error(ErrorKind::kBadValue, parts, [&] { Layout::make(specs, options); });
}

TEST(LayoutErrors, NegativeExtentIsNamed) {
  expect_refused({"'w'", "extents", "-3"}, {{"w", {2, -3}, DType::kFloat32}});
  expect_refused({"'w'", "-1"}, {{"w", {0, -1}, DType::kFloat32}});
}

TEST(LayoutErrors, NamesMustBeThereAndDiffer) {
  expect_refused({"''", "not empty"}, {{"", {2}, DType::kFloat32}});
  expect_refused({"'twice'", "differ"},
                 {{"twice", {2}, DType::kFloat32}, {"twice", {3}, DType::kFloat64}});
}

TEST(LayoutErrors, ExtentProductThatOverflowsIsNamed) {
  expect_refused({"'w'", "2^62"}, {{"w", {kHuge, kHuge}, DType::kFloat32}});
  expect_refused({"'w'", "2^62"}, {{"w", {std::int64_t{1} << 32, std::int64_t{1} << 32}}});
  expect_refused({"'w'", "2^62"}, {{"w", {std::int64_t{1} << 61}, DType::kFloat32}});
  expect_refused({"'w'", "2^62"}, {{"w", {kHuge}, DType::kInt8}});
}

TEST(LayoutErrors, ArenaThatOverflowsIsNamed) {
  const std::vector<std::int64_t> half{std::int64_t{1} << 61};
  expect_refused({"'second'", "uint8", "2^62"},
                 {{"first", half, DType::kUInt8}, {"second", half, DType::kUInt8}});
}

TEST(LayoutErrors, LargeButPossibleIsTaken) {
  const Layout layout = Layout::make({{"w", {std::int64_t{1} << 61}, DType::kUInt8},
                                      {"v", {std::int64_t{1} << 59}, DType::kFloat32}});
  EXPECT_EQ(layout.arenas()[0].size_bytes, std::int64_t{1} << 61);
  EXPECT_EQ(layout.arenas()[1].size_bytes, std::int64_t{1} << 61);
}

TEST(LayoutErrors, AlignmentsMustBePowersOfTwo) {
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-64}, std::int64_t{8},
                                 std::int64_t{48}, std::numeric_limits<std::int64_t>::min()}) {
    LayoutOptions options;
    options.slot_alignment_bytes = bad;
    expect_refused({"slot_alignment_bytes", "power of two", std::to_string(bad)}, {}, options);
  }
  for (const std::int64_t bad : {0, 32, 4097, -4096}) {
    LayoutOptions options;
    options.arena_alignment_bytes = bad;
    expect_refused({"arena_alignment_bytes", "power of two", std::to_string(bad)}, {}, options);
  }
}

TEST(LayoutErrors, BucketCapMustBePositive) {
  for (const std::int64_t bad : {0, -1}) {
    LayoutOptions options;
    options.bucket_bytes = bad;
    expect_refused({"bucket_bytes", "positive", std::to_string(bad)}, {}, options);
  }
}

TEST(LayoutErrors, ShardOfABadRankOrBucketIsNamed) {
  const Layout layout = Layout::make({{"w", {8}, DType::kFloat32}});
  const auto expect_bad = [&](std::initializer_list<std::string> parts, std::int64_t bucket_idx,
                              std::int64_t rank, std::int64_t world_size) {
    expect_error(ErrorKind::kBadValue, parts,
                 [&] { (void)layout.shard(bucket_idx, rank, world_size); });
  };
  expect_bad({"rank", "rank 4 of world size 4"}, 0, 4, 4);
  expect_bad({"rank", "-1"}, 0, -1, 4);
  expect_bad({"rank", "world size 0"}, 0, 0, 0);
  expect_bad({"rank", "world size -2"}, 0, 0, -2);
  expect_bad({"bucket", "1"}, 1, 0, 1);
  expect_bad({"bucket", "-1"}, -1, 0, 1);
}

}  // namespace
}  // namespace tradewind
