// Where every parameter lives. A Layout is a pure function of names, shapes, dtypes and options:
// the same on every rank and machine, independent of the world size. One arena per dtype; slots in
// registration order; buckets are runs of slots of one arena; a shard is one rank's part of a
// bucket, cut at norm blocks. Immutable after make(), so any thread may read it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arena/dtype.h"

namespace tradewind {

// Sums of squares are taken over blocks of this many elements, counted from the start of each
// parameter. Part of the layout's contract: changing it changes every norm's last bits.
inline constexpr std::int64_t kNormBlockElements = 4096;
// Raised whenever the same input would give another layout.
inline constexpr std::int64_t kLayoutVersion = 1;

constexpr std::int64_t num_norm_blocks(std::int64_t num_elements) {
  return (num_elements + kNormBlockElements - 1) / kNormBlockElements;
}

struct SlotSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
};

struct LayoutOptions {
  std::int64_t slot_alignment_bytes = 64;        // one cache line, one AVX-512 register
  std::int64_t arena_alignment_bytes = 4096;     // direct I/O
  std::int64_t bucket_bytes = 25 * 1024 * 1024;  // DistributedDataParallel's default cap
};

struct Slot {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype;
  std::int32_t arena_idx;
  std::int64_t offset_bytes;  // from the start of its arena
  std::int64_t num_elements;

  [[nodiscard]] std::int64_t size_bytes() const { return num_elements * element_bytes(dtype); }
};

struct ByteRange {
  std::int64_t begin_bytes;
  std::int64_t end_bytes;

  [[nodiscard]] std::int64_t size_bytes() const { return end_bytes - begin_bytes; }
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

// Slots [first_slot_idx, first_slot_idx + num_slots) counted within Layout::arena_slots(arena_idx).
struct Bucket {
  std::int32_t arena_idx;
  std::int64_t first_slot_idx;
  std::int64_t num_slots;
  ByteRange range;
  std::int64_t num_norm_blocks;
};

struct ArenaSpec {
  DType dtype;
  std::int64_t size_bytes;  // a multiple of the arena alignment
};

class Layout {
 public:
  // Throws Error(kBadValue) for a negative extent, a repeated or empty name, an extent product or
  // arena above 2^62 bytes, or options that are not powers of two.
  static Layout make(const std::vector<SlotSpec>& specs, const LayoutOptions& options = {});

  [[nodiscard]] const std::vector<Slot>& slots() const { return slots_; }
  [[nodiscard]] const std::vector<ArenaSpec>& arenas() const { return arenas_; }
  [[nodiscard]] const std::vector<Bucket>& buckets() const { return buckets_; }
  // Indices into slots() of one arena's slots, by offset.
  [[nodiscard]] const std::vector<std::int64_t>& arena_slots(std::int32_t arena_idx) const;
  // Rank `rank`'s part of a bucket among `world_size`. The parts of all ranks cover the bucket
  // without overlap; each begins at a norm block. Some are empty where blocks are few.
  [[nodiscard]] ByteRange shard(std::int64_t bucket_idx, std::int64_t rank,
                                std::int64_t world_size) const;
  // Equal exactly where version, options, names, shapes, dtypes and order are equal.
  [[nodiscard]] const std::string& digest() const { return digest_; }

 private:
  void place_slots(const std::vector<SlotSpec>& specs, const LayoutOptions& options);
  void cut_buckets(const LayoutOptions& options);
  void take_digest(const LayoutOptions& options);
  [[nodiscard]] std::int64_t block_offset_bytes(const Bucket& bucket, std::int64_t block_idx) const;

  std::vector<Slot> slots_;
  std::vector<ArenaSpec> arenas_;
  std::vector<std::vector<std::int64_t>> arena_slots_;
  std::vector<Bucket> buckets_;
  std::string digest_;
};

}  // namespace tradewind
