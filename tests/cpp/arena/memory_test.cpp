#include "arena/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "base/error_matching.h"

namespace tradewind {
namespace {

using Fork = ArenaMemory::Fork;

static_assert(!std::is_copy_constructible_v<ArenaMemory>);
static_assert(!std::is_move_constructible_v<ArenaMemory>);
static_assert(std::is_nothrow_destructible_v<ArenaMemory>);

constexpr std::int64_t kSizes[] = {1, 4096, 4097, 100'000, 2 << 20, (5 << 20) + 4096};

TEST(ArenaMemory, IsZeroAndWritableToItsLastByte) {
  for (const Fork fork : {Fork::kShare, Fork::kHide}) {
    for (const std::int64_t size_bytes : kSizes) {
      const ArenaMemory memory(size_bytes, fork);
      EXPECT_EQ(memory.size_bytes(), size_bytes);
      std::byte* const begin = memory.data();
      std::byte* const end = begin + size_bytes;
      EXPECT_TRUE(std::all_of(begin, end, [](std::byte value) { return value == std::byte{0}; }));
      std::fill(begin, end, std::byte{0x5A});
      EXPECT_EQ(std::count(begin, end, std::byte{0x5A}), size_bytes);
    }
  }
}

TEST(ArenaMemory, IsAlignedToPagesAndLargeOnesToHugePages) {
  for (const std::int64_t size_bytes : kSizes) {
    const ArenaMemory memory(size_bytes, Fork::kHide);
    const std::uintptr_t alignment = size_bytes >= 2 << 20 ? 2 << 20 : 4096;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % alignment, 0U) << size_bytes;
  }
}

TEST(ArenaMemory, OfNoBytesHasAnAddress) {
  const ArenaMemory memory(0, Fork::kShare);
  EXPECT_NE(memory.data(), nullptr);
  EXPECT_EQ(memory.size_bytes(), 0);
}

TEST(ArenaMemory, ANewOneIsZeroWhereAnOldOneWas) {
  for (int i = 0; i < 3; ++i) {
    const ArenaMemory memory(1 << 20, Fork::kShare);
    EXPECT_EQ(memory.data()[1 << 19], std::byte{0});
    std::fill_n(memory.data(), 1 << 20, std::byte{1});
  }
}

TEST(ArenaMemory, AHugeSizeIsRefusedByName) {
  for (const std::int64_t size_bytes :
       {std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
    expect_error(ErrorKind::kOutOfMemory, {"arena", std::to_string(size_bytes), "memory"},
                 [&] { const ArenaMemory memory(size_bytes, Fork::kHide); });
  }
}

TEST(ArenaMemory, ANegativeSizeIsRefused) {
  expect_error(ErrorKind::kBadValue, {"arena", "-1"},
               [] { const ArenaMemory memory(-1, Fork::kHide); });
}

}  // namespace
}  // namespace tradewind
