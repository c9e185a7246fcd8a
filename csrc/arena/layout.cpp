#include "arena/layout.h"

#include <array>
#include <limits>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/fingerprint.h"

namespace tradewind {
namespace {

constexpr std::int64_t kLargestArenaBytes = std::int64_t{1} << 62;

bool is_power_of_two(std::int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

std::int64_t round_up(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

void check_options(const LayoutOptions& options) {
  if (!is_power_of_two(options.slot_alignment_bytes) || options.slot_alignment_bytes < 16) {
    fail(ErrorKind::kBadValue, "slot_alignment_bytes: expected a power of two of at least 16, got ",
         options.slot_alignment_bytes);
  }
  if (!is_power_of_two(options.arena_alignment_bytes) ||
      options.arena_alignment_bytes < options.slot_alignment_bytes) {
    fail(ErrorKind::kBadValue,
         "arena_alignment_bytes: expected a power of two of at least slot_alignment_bytes (",
         options.slot_alignment_bytes, "), got ", options.arena_alignment_bytes);
  }
  if (options.bucket_bytes <= 0) {
    fail(ErrorKind::kBadValue, "bucket_bytes: expected a positive size, got ",
         options.bucket_bytes);
  }
}

std::int64_t count_elements(const SlotSpec& spec) {
  std::int64_t num_elements = 1;
  for (const std::int64_t extent : spec.shape) {
    if (extent < 0) {
      fail(ErrorKind::kBadValue, "parameter '", spec.name,
           "': expected extents of zero or more, got ", extent);
    }
    if (__builtin_mul_overflow(num_elements, extent, &num_elements) ||
        num_elements > kLargestArenaBytes / element_bytes(spec.dtype)) {
      fail(ErrorKind::kBadValue, "parameter '", spec.name,
           "': its shape asks for more than 2^62 bytes");
    }
  }
  return num_elements;
}

}  // namespace

Layout Layout::make(const std::vector<SlotSpec>& specs, const LayoutOptions& options) {
  check_options(options);
  Layout layout;
  layout.place_slots(specs, options);
  layout.cut_buckets(options);
  layout.take_digest(options);
  return layout;
}

const std::vector<std::int64_t>& Layout::arena_slots(std::int32_t arena_idx) const {
  return arena_slots_.at(static_cast<std::size_t>(arena_idx));
}

void Layout::place_slots(const std::vector<SlotSpec>& specs, const LayoutOptions& options) {
  std::array<std::int32_t, kNumDTypes> arena_of_dtype{};
  arena_of_dtype.fill(-1);
  std::unordered_set<std::string> names;
  for (const SlotSpec& spec : specs) {
    if (spec.name.empty() || !names.insert(spec.name).second) {
      fail(ErrorKind::kBadValue, "parameter name '", spec.name,
           "': expected names that are not empty and differ from one another");
    }
    std::int32_t& arena_idx = arena_of_dtype[static_cast<std::size_t>(spec.dtype)];
    if (arena_idx < 0) {
      arena_idx = static_cast<std::int32_t>(arenas_.size());
      arenas_.push_back({spec.dtype, 0});
      arena_slots_.emplace_back();
    }
    ArenaSpec& arena = arenas_[static_cast<std::size_t>(arena_idx)];
    Slot slot{spec.name, spec.shape, spec.dtype, arena_idx, arena.size_bytes, count_elements(spec)};
    if (slot.size_bytes() > kLargestArenaBytes - arena.size_bytes - options.arena_alignment_bytes) {
      fail(ErrorKind::kBadValue, "parameter '", spec.name, "': the ", dtype_name(spec.dtype),
           " arena would exceed 2^62 bytes");
    }
    arena.size_bytes =
        round_up(slot.offset_bytes + slot.size_bytes(), options.slot_alignment_bytes);
    arena_slots_[static_cast<std::size_t>(arena_idx)].push_back(
        static_cast<std::int64_t>(slots_.size()));
    slots_.push_back(std::move(slot));
  }
  for (ArenaSpec& arena : arenas_) {
    arena.size_bytes = round_up(arena.size_bytes, options.arena_alignment_bytes);
  }
}

void Layout::cut_buckets(const LayoutOptions& options) {
  for (std::size_t arena_idx = 0; arena_idx < arenas_.size(); ++arena_idx) {
    const std::vector<std::int64_t>& members = arena_slots_[arena_idx];
    std::int64_t first_slot_idx = 0;
    std::int64_t blocks = 0;
    const auto num_members = static_cast<std::int64_t>(members.size());
    for (std::int64_t i = 0; i < num_members; ++i) {
      const auto slot_at = [&](std::int64_t member) -> const Slot& {
        return slots_[static_cast<std::size_t>(members[static_cast<std::size_t>(member)])];
      };
      blocks += num_norm_blocks(slot_at(i).num_elements);
      const std::int64_t begin_bytes = slot_at(first_slot_idx).offset_bytes;
      const bool is_last = i + 1 == num_members;
      const bool is_full =
          is_last || slot_at(i + 1).offset_bytes + slot_at(i + 1).size_bytes() - begin_bytes >
                         options.bucket_bytes;
      if (!is_full) continue;
      const std::int64_t end_bytes =
          round_up(slot_at(i).offset_bytes + slot_at(i).size_bytes(), options.slot_alignment_bytes);
      buckets_.push_back({static_cast<std::int32_t>(arena_idx),
                          first_slot_idx,
                          i + 1 - first_slot_idx,
                          {begin_bytes, end_bytes},
                          blocks});
      first_slot_idx = i + 1;
      blocks = 0;
    }
  }
}

std::int64_t Layout::block_offset_bytes(const Bucket& bucket, std::int64_t block_idx) const {
  const std::vector<std::int64_t>& members = arena_slots(bucket.arena_idx);
  for (std::int64_t i = 0; i < bucket.num_slots; ++i) {
    const auto member = static_cast<std::size_t>(bucket.first_slot_idx + i);
    const Slot& slot = slots_[static_cast<std::size_t>(members[member])];
    const std::int64_t blocks = num_norm_blocks(slot.num_elements);
    if (block_idx < blocks) {
      return slot.offset_bytes + block_idx * kNormBlockElements * element_bytes(slot.dtype);
    }
    block_idx -= blocks;
  }
  return bucket.range.end_bytes;
}

ByteRange Layout::shard(std::int64_t bucket_idx, std::int64_t rank, std::int64_t world_size) const {
  if (bucket_idx < 0 || bucket_idx >= static_cast<std::int64_t>(buckets_.size())) {
    fail(ErrorKind::kBadValue, "bucket: expected 0 to ", buckets_.size(), " (exclusive), got ",
         bucket_idx);
  }
  if (world_size <= 0 || rank < 0 || rank >= world_size) {
    fail(ErrorKind::kBadValue, "rank: expected 0 <= rank < world size, got rank ", rank,
         " of world size ", world_size);
  }
  const Bucket& bucket = buckets_[static_cast<std::size_t>(bucket_idx)];
  const auto cut = [&](std::int64_t part) {
    // The first shard begins where the bucket does, before any empty slots.
    if (part == 0) return bucket.range.begin_bytes;
    const std::int64_t whole = bucket.num_norm_blocks / world_size * part;
    return block_offset_bytes(bucket,
                              whole + bucket.num_norm_blocks % world_size * part / world_size);
  };
  return {cut(rank), cut(rank + 1)};
}

void Layout::take_digest(const LayoutOptions& options) {
  Fingerprint fingerprint;
  fingerprint.add(kLayoutVersion);
  fingerprint.add(kNormBlockElements);
  fingerprint.add(options.slot_alignment_bytes);
  fingerprint.add(options.arena_alignment_bytes);
  fingerprint.add(options.bucket_bytes);
  for (const Slot& slot : slots_) {
    fingerprint.add(slot.name);
    fingerprint.add(dtype_name(slot.dtype));
    fingerprint.add(static_cast<std::int64_t>(slot.shape.size()));
    for (const std::int64_t extent : slot.shape) fingerprint.add(extent);
    fingerprint.add(slot.offset_bytes);
  }
  digest_ = fingerprint.hex();
}

}  // namespace tradewind
