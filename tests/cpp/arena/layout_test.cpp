#include "arena/layout.h"

#include <gtest/gtest.h>

#include "arena/random_layout.h"

namespace tradewind {
namespace {

TEST(Layout, ASmallOneByHand) {
  const Layout layout = Layout::make({{"a", {3}, DType::kFloat32},
                                      {"b", {}, DType::kFloat64},
                                      {"c", {17}, DType::kFloat32},
                                      {"d", {0}, DType::kFloat32},
                                      {"e", {2, 5}, DType::kFloat32}});
  ASSERT_EQ(layout.arenas().size(), 2U);
  EXPECT_EQ(layout.arenas()[0].dtype, DType::kFloat32);
  EXPECT_EQ(layout.arenas()[1].dtype, DType::kFloat64);
  EXPECT_EQ(layout.arenas()[0].size_bytes, 4096);
  EXPECT_EQ(layout.arena_slots(0), (std::vector<std::int64_t>{0, 2, 3, 4}));
  EXPECT_EQ(layout.arena_slots(1), (std::vector<std::int64_t>{1}));
  const std::vector<std::int64_t> offsets{0, 0, 64, 192, 192};
  const std::vector<std::int64_t> num_elements{3, 1, 17, 0, 10};
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    EXPECT_EQ(layout.slots()[i].offset_bytes, offsets[i]) << i;
    EXPECT_EQ(layout.slots()[i].num_elements, num_elements[i]) << i;
  }
}

TEST(Layout, SlotsKeepTheInputInItsOrder) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    ASSERT_EQ(layout.slots().size(), input.specs.size());
    for (std::size_t i = 0; i < input.specs.size(); ++i) {
      const Slot& slot = layout.slots()[i];
      EXPECT_EQ(slot.name, input.specs[i].name);
      EXPECT_EQ(slot.shape, input.specs[i].shape);
      EXPECT_EQ(slot.dtype, input.specs[i].dtype);
      EXPECT_EQ(layout.arenas()[static_cast<std::size_t>(slot.arena_idx)].dtype, slot.dtype);
    }
  }
}

TEST(Layout, SlotsOfAnArenaAreAlignedDisjointAndInRegistrationOrder) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    std::size_t num_listed = 0;
    for (std::size_t arena = 0; arena < layout.arenas().size(); ++arena) {
      std::int64_t end_bytes = 0;
      std::int64_t previous_idx = -1;
      for (const std::int64_t idx : layout.arena_slots(static_cast<std::int32_t>(arena))) {
        const Slot& slot = layout.slots()[static_cast<std::size_t>(idx)];
        EXPECT_EQ(slot.arena_idx, static_cast<std::int32_t>(arena));
        EXPECT_GT(idx, previous_idx);
        EXPECT_EQ(slot.offset_bytes % input.options.slot_alignment_bytes, 0);
        EXPECT_GE(slot.offset_bytes, end_bytes);
        EXPECT_LT(slot.offset_bytes - end_bytes, input.options.slot_alignment_bytes);
        end_bytes = slot.offset_bytes + slot.size_bytes();
        previous_idx = idx;
        ++num_listed;
      }
      EXPECT_LE(end_bytes, layout.arenas()[arena].size_bytes);
    }
    EXPECT_EQ(num_listed, layout.slots().size());
  }
}

TEST(Layout, ArenasAreWholePagesAndOnePerDType) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput input = random_layout_input(seed);
    const Layout layout = Layout::make(input.specs, input.options);
    std::vector<bool> seen(kNumDTypes, false);
    for (const ArenaSpec& arena : layout.arenas()) {
      EXPECT_EQ(arena.size_bytes % input.options.arena_alignment_bytes, 0);
      EXPECT_EQ(arena.size_bytes % 4096, 0);
      EXPECT_FALSE(seen[static_cast<std::size_t>(arena.dtype)]);
      seen[static_cast<std::size_t>(arena.dtype)] = true;
    }
  }
}

TEST(Layout, NoSlotsGiveNoArenas) {
  const Layout layout = Layout::make({});
  EXPECT_TRUE(layout.slots().empty());
  EXPECT_TRUE(layout.arenas().empty());
  EXPECT_TRUE(layout.buckets().empty());
  EXPECT_EQ(layout.digest().size(), 16U);
}

TEST(Layout, EmptySlotsTakeNoSpaceAnywhere) {
  for (const std::size_t place : {0U, 1U, 2U}) {
    std::vector<SlotSpec> specs{{"a", {5}, DType::kFloat32}, {"b", {7}, DType::kFloat32}};
    specs.insert(specs.begin() + static_cast<std::ptrdiff_t>(place),
                 {"empty", {4, 0}, DType::kFloat32});
    const Layout layout = Layout::make(specs);
    EXPECT_EQ(layout.slots()[place].num_elements, 0);
    EXPECT_EQ(layout.slots()[place].offset_bytes, static_cast<std::int64_t>(64 * place));
    EXPECT_EQ(layout.arenas()[0].size_bytes, 4096);
  }
  const Layout alone = Layout::make({{"empty", {0}, DType::kFloat32}});
  EXPECT_EQ(alone.arenas()[0].size_bytes, 0);
  EXPECT_EQ(alone.buckets().size(), 1U);
}

TEST(Layout, NormBlocks) {
  EXPECT_EQ(num_norm_blocks(0), 0);
  EXPECT_EQ(num_norm_blocks(1), 1);
  EXPECT_EQ(num_norm_blocks(4096), 1);
  EXPECT_EQ(num_norm_blocks(4097), 2);
}

}  // namespace
}  // namespace tradewind
