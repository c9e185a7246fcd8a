#include "checkpoint/shard_layout.h"

#include <gtest/gtest.h>

#include "base/error_matching.h"
#include "checkpoint/shard_case.h"

namespace tradewind {
namespace {

ShardLayout layout_of(ShardCase& input) {
  ShardWriter::Request request = input.request(nullptr, "");
  return {request.header, request.regions, request.block_bytes};
}

std::string bytes_of(const ShardLayout& layout, std::int64_t begin, std::int64_t end) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(end - begin), std::byte{0x55});
  layout.copy(begin, bytes);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(ShardLayout, HasTheHeaderThenRegionsAndZerosBetween) {
  ShardCase input({5000, 1, 4096, 0, 12288, 4095}, 3, 8192, /*gap_pages=*/1);
  const ShardLayout layout = layout_of(input);
  const auto size = static_cast<std::int64_t>(input.file.size());
  EXPECT_EQ(layout.size_bytes(), size);
  EXPECT_EQ(bytes_of(layout, 0, size), input.file);
  for (const std::int64_t begin : {1, 4095, 8192, 12288, 20000}) {
    for (const std::int64_t end : {begin, begin + 1, begin + 4096, begin + 9999}) {
      EXPECT_EQ(bytes_of(layout, begin, end),
                input.file.substr(static_cast<std::size_t>(begin),
                                  static_cast<std::size_t>(end - begin)));
    }
  }
}

TEST(ShardLayout, BlocksCoverTheFile) {
  ShardCase input({30'000}, 0, 16384);
  const ShardLayout layout = layout_of(input);
  ASSERT_EQ(layout.num_blocks(), 3);
  std::int64_t end = 0;
  for (std::int64_t block = 0; block < 3; ++block) {
    EXPECT_EQ(layout.block_begin(block), end);
    end = layout.block_end(block);
  }
  EXPECT_EQ(end, layout.size_bytes());
}

TEST(ShardLayout, RefusesWhatDoesNotFitThePages) {
  const Bytes memory(10'000, 0, 1);
  const auto make = [&](std::size_t header_bytes, std::vector<ShardRegion> regions,
                        std::int64_t block_bytes) {
    ShardLayout layout(std::string(header_bytes, ' '), std::move(regions), block_bytes);
  };
  using Parts = std::initializer_list<std::string>;
  const auto refuses = [&](const Parts& parts, const auto&... given) {
    expect_error(ErrorKind::kBadValue, parts, [&] { make(given...); });
  };
  const std::vector<ShardRegion> none;
  refuses({"header", "4095"}, 4095U, none, 4096);
  refuses({"header", "got 0"}, 0U, none, 4096);
  for (const std::int64_t block_bytes :
       {std::int64_t{0}, std::int64_t{-4096}, std::int64_t{6000}, std::int64_t{1} << 31}) {
    refuses({"blocks", std::to_string(block_bytes)}, 4096U, none, block_bytes);
  }
  const auto one = [&](std::int64_t offset, std::int64_t bytes) {
    return std::vector<ShardRegion>{{offset, memory.data(), bytes}};
  };
  refuses({"region", "got 0"}, 4096U, one(0, 10), 4096);
  refuses({"region", "got 4097"}, 4096U, one(4097, 10), 4096);
  refuses({"memory", "got -1"}, 4096U, one(4096, -1), 4096);
  refuses({"memory", "at 0"}, 4096U, std::vector<ShardRegion>{{4096, nullptr, 1}}, 4096);
  refuses({"not before 12288", "got 8192"}, 4096U,
          std::vector<ShardRegion>{{4096, memory.data(), 4097}, {8192, memory.data(), 1}}, 4096);
}

TEST(ShardLayout, BlocksGoOutAsSweepsWantTheirMemory) {
  // Three regions of one page more than three, four and three blocks; the second is not closed.
  ShardCase input({3 * 8192, 2 * 8192, 4 * 8192}, 0, 8192);
  const ShardLayout layout = layout_of(input);
  const std::vector<MemoryRange> ranges = input.ranges();
  const auto closing = memory_gate().close(std::vector<MemoryRange>{ranges[0], ranges[2]});
  // Block 0 is the header; 1 to 3, at 0, 1/3 and 2/3 of their range; 4 and 5; 6 to 9, at 0 to 3/4.
  EXPECT_EQ(layout.block_order(closing.get()),
            (std::vector<std::int64_t>{1, 6, 7, 2, 8, 3, 9, 0, 4, 5}));
  EXPECT_EQ(layout.block_order(nullptr), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(ShardLayout, KnowsWhetherMemoryStandsInTheFileTwice) {
  const Bytes memory(3 * 4096, 0, 1);
  const auto is_once = [&](std::int64_t second_begin) {
    return ShardLayout(std::string(4096, ' '),
                       {{4096, memory.data() + second_begin, 4096}, {8192, memory.data(), 4096}},
                       4096)
        .is_each_byte_once();
  };
  EXPECT_TRUE(is_once(4096));
  EXPECT_FALSE(is_once(4095));
  EXPECT_FALSE(is_once(0));
}

}  // namespace
}  // namespace tradewind
