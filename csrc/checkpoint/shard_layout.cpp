#include "checkpoint/shard_layout.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace tradewind {
namespace {

constexpr std::int64_t kLargestBlock = std::int64_t{1} << 30;

bool is_whole_pages(std::int64_t bytes) { return bytes >= 0 && bytes % kFilePageBytes == 0; }

void check_sizes(std::int64_t header_bytes, std::int64_t block_bytes) {
  if (header_bytes == 0 || !is_whole_pages(header_bytes)) {
    fail(ErrorKind::kBadValue, "shard: expected a header of whole pages of ", kFilePageBytes,
         " bytes, got ", header_bytes, " bytes; pad it with spaces");
  }
  if (block_bytes == 0 || !is_whole_pages(block_bytes) || block_bytes > kLargestBlock) {
    fail(ErrorKind::kBadValue, "shard: expected blocks of whole pages of ", kFilePageBytes,
         " bytes and at most ", kLargestBlock, ", got ", block_bytes);
  }
}

void check_region(const ShardRegion& region, std::int64_t least_offset) {
  if (region.size_bytes < 0 || (region.size_bytes > 0 && region.data == nullptr)) {
    fail(ErrorKind::kBadValue, "shard: expected memory of zero or more bytes for the region at ",
         region.file_offset, ", got ", region.size_bytes, " bytes at ", region.data);
  }
  if (!is_whole_pages(region.file_offset) || region.file_offset < least_offset) {
    fail(ErrorKind::kBadValue, "shard: expected the next region at a multiple of ", kFilePageBytes,
         " bytes and not before ", least_offset, ", got ", region.file_offset,
         "; regions come in ascending order and do not overlap");
  }
}

}  // namespace

ShardLayout::ShardLayout(std::string header, std::vector<ShardRegion> regions,
                         std::int64_t block_bytes)
    : header_(std::move(header)), block_bytes_(block_bytes) {
  const auto header_bytes = static_cast<std::int64_t>(header_.size());
  check_sizes(header_bytes, block_bytes);
  regions_.push_back({0, header_.data(), header_bytes});
  std::int64_t end = header_bytes;
  for (const ShardRegion& region : regions) {
    check_region(region, end);
    end = round_up_to_page(region.end());
    if (region.size_bytes > 0) regions_.push_back(region);
  }
  size_bytes_ = end;
}

void ShardLayout::copy(std::int64_t begin, std::span<std::byte> to) const {
  if (to.empty()) return;  // its data may be null, which memcpy takes for no number of bytes
  std::int64_t done = begin;
  const auto zero_until = [&](std::int64_t offset) {
    std::fill(to.begin() + (done - begin), to.begin() + (offset - begin), std::byte{0});
  };
  visit(begin, begin + static_cast<std::int64_t>(to.size()),
        [&](std::int64_t offset, const std::byte* data, std::int64_t bytes) {
          zero_until(offset);
          std::memcpy(to.data() + (offset - begin), data, static_cast<std::size_t>(bytes));
          done = offset + bytes;
        });
  zero_until(begin + static_cast<std::int64_t>(to.size()));
}

std::vector<std::int64_t> ShardLayout::block_order(const GateClosing* closing) const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(num_blocks()));
  std::iota(order.begin(), order.end(), 0);
  if (closing == nullptr) return order;
  std::vector<double> positions;
  for (const std::int64_t block : order) {
    double& position = positions.emplace_back(1.0);
    visit(block_begin(block), block_end(block),
          [&](std::int64_t, const std::byte* data, std::int64_t) {
            position = std::min(position, closing->position_of(data));
          });
  }
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return positions[static_cast<std::size_t>(a)] < positions[static_cast<std::size_t>(b)];
  });
  return order;
}

bool ShardLayout::is_each_byte_once() const {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
  for (const ShardRegion& region : regions_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(region.data);
    ranges.emplace_back(begin, begin + static_cast<std::uintptr_t>(region.size_bytes));
  }
  std::sort(ranges.begin(), ranges.end());
  return std::adjacent_find(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
           return a.second > b.first;
         }) == ranges.end();
}

}  // namespace tradewind
