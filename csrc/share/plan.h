// How a layout's gradients travel: buckets (runs of slots that become ready together) cut into
// pieces (what is sent at a time), each piece cut into one shard a rank. All cuts lie at norm
// blocks, so that every block has one owner. A pure function of layout, world size and options: the
// same on every rank. Immutable, so any thread may read it.
#pragma once

#include <cstdint>
#include <vector>

#include "arena/layout.h"

namespace tradewind {

struct PlanOptions {
  std::int64_t bucket_bytes = 4 * 1024 * 1024;
  // Of the buckets at both ends: the first to be sent, and the one that is waited for last.
  std::int64_t end_bucket_bytes = 1024 * 1024;
  std::int64_t piece_bytes = 1024 * 1024;
  // By slot, or empty: neighbours with different keys never share a bucket.
  std::vector<std::int64_t> slot_keys = {};
};

// A place within a layout that does not depend on dtypes: an element of a slot, of those in the
// plan's order of slots.
struct Cut {
  std::int64_t slot_idx;  // into Layout::slots(); the last cut of an arena may be its end
  std::int64_t element;
};

struct PlanPiece {
  std::int32_t bucket_idx;
  std::vector<Cut> cuts;  // world_size + 1: rank r has [cuts[r], cuts[r + 1])
};

struct PlanBucket {
  std::int32_t arena_idx;
  std::vector<std::int64_t> slots;  // into Layout::slots(), by offset
  std::int32_t first_piece_idx;
  std::int32_t num_pieces;
};

class Plan {
 public:
  // Buckets come in the order in which backward fills them as a rule: the last slots first. Throws
  // Error(kBadValue) for sizes below one byte or a world of less than one rank.
  static Plan make(const Layout& layout, int world_size, const PlanOptions& options = {});

  [[nodiscard]] int world_size() const { return world_size_; }
  [[nodiscard]] const std::vector<PlanBucket>& buckets() const { return buckets_; }
  [[nodiscard]] const std::vector<PlanPiece>& pieces() const { return pieces_; }
  // Into Layout::slots() -> bucket; -1 for slots without elements.
  [[nodiscard]] std::int32_t bucket_of(std::int64_t slot_idx) const {
    return bucket_of_[static_cast<std::size_t>(slot_idx)];
  }

 private:
  int world_size_ = 1;
  std::vector<PlanBucket> buckets_;
  std::vector<PlanPiece> pieces_;
  std::vector<std::int32_t> bucket_of_;
};

// Bytes [cuts[first], cuts[last]) of the cuts' arena in this layout, which must have the plan's
// slots in the plan's order, of any dtype.
ByteRange range_between(const Layout& layout, const Cut& begin, const Cut& end);

// A run of one slot's elements.
struct SlotRun {
  std::int64_t slot_idx;
  std::int64_t begin, end;  // elements
};
// The slots' parts between two cuts, by offset; each begins at a norm block.
std::vector<SlotRun> runs_between(const Layout& layout, const Cut& begin, const Cut& end);

}  // namespace tradewind
