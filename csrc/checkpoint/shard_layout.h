// What stands where in a shard file: a header, then regions of memory as they are, with zeros
// between them and up to the next page. Pure; the memory of regions belongs to the caller, the
// header is a copy. Immutable, so any thread may read it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "arena/gate.h"

namespace tradewind {

// Offsets of regions, sizes of headers, blocks and files are multiples of it: what direct I/O needs
// on every disk in use. (Disks with larger sectors are written through the page cache.)
inline constexpr std::int64_t kFilePageBytes = 4096;

constexpr std::int64_t round_up_to_page(std::int64_t bytes) {
  return (bytes + kFilePageBytes - 1) / kFilePageBytes * kFilePageBytes;
}

struct ShardRegion {
  std::int64_t file_offset = 0;
  const void* data = nullptr;
  std::int64_t size_bytes = 0;

  [[nodiscard]] std::int64_t end() const { return file_offset + size_bytes; }
};

class ShardLayout {
 public:
  // Throws Error(kBadValue) where sizes or offsets are not multiples of a page, or regions are out
  // of order, overlap, or stand in the header.
  ShardLayout(std::string header, std::vector<ShardRegion> regions, std::int64_t block_bytes);
  // Not copied: one of the regions points at the header's copy.
  ShardLayout(const ShardLayout&) = delete;
  ShardLayout& operator=(const ShardLayout&) = delete;

  [[nodiscard]] std::int64_t size_bytes() const { return size_bytes_; }
  [[nodiscard]] std::int64_t block_bytes() const { return block_bytes_; }
  [[nodiscard]] std::int64_t num_blocks() const {
    return (size_bytes_ + block_bytes_ - 1) / block_bytes_;
  }
  [[nodiscard]] std::int64_t block_begin(std::int64_t block) const { return block * block_bytes_; }
  [[nodiscard]] std::int64_t block_end(std::int64_t block) const {
    return std::min(size_bytes_, (block + 1) * block_bytes_);
  }

  // Calls visit(file offset, data, bytes) for what [begin, end) holds of the header and of regions,
  // in order; what is left out is zero.
  template <class Visit>
  void visit(std::int64_t begin, std::int64_t end, const Visit& visit_one) const {
    auto region = std::upper_bound(
        regions_.begin(), regions_.end(), begin,
        [](std::int64_t offset, const ShardRegion& one) { return offset < one.end(); });
    for (; region != regions_.end() && region->file_offset < end; ++region) {
      const std::int64_t first = std::max(begin, region->file_offset);
      const std::int64_t last = std::min(end, region->end());
      visit_one(first, static_cast<const std::byte*>(region->data) + (first - region->file_offset),
                last - first);
    }
  }
  // The bytes [begin, begin + to.size()) of the file.
  void copy(std::int64_t begin, std::span<std::byte> to) const;

  // All blocks, as sweeps will want the memory that is closed: by where it lies in its range. The
  // others last. By their numbers where nothing is closed.
  [[nodiscard]] std::vector<std::int64_t> block_order(const GateClosing* closing) const;
  // Whether no byte of memory stands in the file twice.
  [[nodiscard]] bool is_each_byte_once() const;

 private:
  std::string header_;
  std::vector<ShardRegion> regions_;  // the header is the first one; none is empty
  std::int64_t block_bytes_;
  std::int64_t size_bytes_;
};

}  // namespace tradewind
