#include "share/plan.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/error.h"

namespace tradewind {
namespace {

// A shard of fewer blocks than this would differ too much in size from its neighbours.
constexpr std::int64_t kShardBlocks = 4;

const Slot& slot_at(const Layout& layout, std::int64_t slot_idx) {
  return layout.slots()[static_cast<std::size_t>(slot_idx)];
}

std::int64_t bytes_of(const Layout& layout, const Cut& cut) {
  const Slot& slot = slot_at(layout, cut.slot_idx);
  return slot.offset_bytes + cut.element * element_bytes(slot.dtype);
}

// A run of slots of one arena.
struct Run {
  std::int32_t arena_idx;
  std::vector<std::int64_t> slots;

  [[nodiscard]] std::int64_t begin_bytes(const Layout& layout) const {
    return slot_at(layout, slots.front()).offset_bytes;
  }
  [[nodiscard]] std::int64_t end_bytes(const Layout& layout) const {
    const Slot& last = slot_at(layout, slots.back());
    return last.offset_bytes + last.size_bytes();
  }
  [[nodiscard]] std::int64_t size_bytes(const Layout& layout) const {
    return end_bytes(layout) - begin_bytes(layout);
  }
};

// The allowed cut nearest to an offset within the run.
Cut cut_near(const Layout& layout, const Run& run, std::int64_t offset_bytes) {
  const auto after = std::upper_bound(run.slots.begin(), run.slots.end(), offset_bytes,
                                      [&](std::int64_t offset, std::int64_t slot_idx) {
                                        return offset < slot_at(layout, slot_idx).offset_bytes;
                                      });
  if (after == run.slots.begin()) return {run.slots.front(), 0};
  const Slot& slot = slot_at(layout, *std::prev(after));
  const std::int64_t block_bytes = kNormBlockElements * element_bytes(slot.dtype);
  const std::int64_t block = (offset_bytes - slot.offset_bytes + block_bytes / 2) / block_bytes;
  if (block < num_norm_blocks(slot.num_elements)) {
    return {*std::prev(after), block * kNormBlockElements};
  }
  if (after == run.slots.end()) return {run.slots.back(), slot.num_elements};
  return {*after, 0};
}

bool may_share_bucket(const PlanOptions& options, std::int64_t a, std::int64_t b) {
  return options.slot_keys.empty() || options.slot_keys[static_cast<std::size_t>(a)] ==
                                          options.slot_keys[static_cast<std::size_t>(b)];
}

// What of `size` comes before part `part` of `num_parts`.
std::int64_t part_begin(std::int64_t size, std::int64_t part, std::int64_t num_parts) {
  return size / num_parts * part + size % num_parts * part / num_parts;
}

Cut cut_between(const Layout& layout, const Run& run, std::int64_t piece, std::int64_t num_pieces) {
  if (piece == 0) return {run.slots.front(), 0};
  if (piece == num_pieces) {
    return {run.slots.back(), slot_at(layout, run.slots.back()).num_elements};
  }
  return cut_near(layout, run,
                  run.begin_bytes(layout) + part_begin(run.size_bytes(layout), piece, num_pieces));
}

// One shard a rank. `owed`: by how many bytes the cut before each rank lay too low in earlier
// pieces. This one makes up for it: buckets that are all alike would else favour the same ranks.
std::vector<Cut> cut_shards(const Layout& layout, const Run& run, const Cut& begin, const Cut& end,
                            std::vector<std::int64_t>& owed) {
  const auto world_size = static_cast<std::int64_t>(owed.size());
  const std::int64_t begin_bytes = bytes_of(layout, begin);
  const std::int64_t end_bytes = bytes_of(layout, end);
  std::vector<Cut> cuts{begin};
  for (std::int64_t rank = 1; rank < world_size; ++rank) {
    std::int64_t& owed_bytes = owed[static_cast<std::size_t>(rank)];
    const std::int64_t wanted =
        begin_bytes + part_begin(end_bytes - begin_bytes, rank, world_size) + owed_bytes;
    Cut cut = cut_near(layout, run, wanted);
    if (bytes_of(layout, cut) < bytes_of(layout, cuts.back())) cut = cuts.back();
    if (bytes_of(layout, cut) > end_bytes) cut = end;
    owed_bytes = wanted - bytes_of(layout, cut);
    cuts.push_back(cut);
  }
  cuts.push_back(end);
  return cuts;
}

// From the arena's last slot to its first.
std::vector<Run> cut_runs(const Layout& layout, std::int32_t arena_idx,
                          const PlanOptions& options) {
  std::vector<Run> runs;
  const auto& members = layout.arena_slots(arena_idx);
  for (auto member = members.rbegin(); member != members.rend(); ++member) {
    if (slot_at(layout, *member).num_elements == 0) continue;
    // A bucket is full once it has reached its size: a small slot beside a large one travels with
    // it.
    const std::int64_t cap = runs.size() <= 1 ? options.end_bucket_bytes : options.bucket_bytes;
    const bool is_full = runs.empty() || runs.back().size_bytes(layout) >= cap;
    if (is_full || !may_share_bucket(options, runs.back().slots.front(), *member)) {
      runs.push_back({arena_idx, {}});
    }
    runs.back().slots.insert(runs.back().slots.begin(), *member);
  }
  // The run that backward fills last: what it holds beyond a small one goes before it.
  if (!runs.empty() && runs.back().size_bytes(layout) > options.end_bucket_bytes) {
    Run& last = runs.back();
    Run rest{arena_idx, {}};
    while (last.slots.size() > 1 && last.size_bytes(layout) > options.end_bucket_bytes) {
      rest.slots.insert(rest.slots.begin(), last.slots.back());
      last.slots.pop_back();
    }
    if (!rest.slots.empty()) runs.insert(std::prev(runs.end()), std::move(rest));
  }
  return runs;
}

void check(int world_size, const PlanOptions& options) {
  if (world_size < 1) {
    fail(ErrorKind::kBadValue, "world size: expected at least one rank, got ", world_size);
  }
  const auto check_size = [](const char* name, std::int64_t bytes) {
    if (bytes < 1) fail(ErrorKind::kBadValue, name, ": expected a positive size, got ", bytes);
  };
  check_size("bucket_bytes", options.bucket_bytes);
  check_size("end_bucket_bytes", options.end_bucket_bytes);
  check_size("piece_bytes", options.piece_bytes);
}

}  // namespace

Plan Plan::make(const Layout& layout, int world_size, const PlanOptions& options) {
  check(world_size, options);
  Plan plan;
  plan.world_size_ = world_size;
  plan.bucket_of_.assign(layout.slots().size(), -1);
  const std::int64_t smallest_piece =
      world_size * kShardBlocks * kNormBlockElements * std::int64_t{sizeof(float)};
  const std::int64_t piece_bytes = std::max(options.piece_bytes, smallest_piece);
  std::vector<std::int64_t> owed(static_cast<std::size_t>(world_size));
  for (std::size_t arena = 0; arena < layout.arenas().size(); ++arena) {
    for (Run& run : cut_runs(layout, static_cast<std::int32_t>(arena), options)) {
      const auto bucket_idx = static_cast<std::int32_t>(plan.buckets_.size());
      const std::int64_t size = run.size_bytes(layout);
      const std::int64_t num_pieces = (size + piece_bytes - 1) / piece_bytes;
      PlanBucket bucket{run.arena_idx,
                        {},
                        static_cast<std::int32_t>(plan.pieces_.size()),
                        static_cast<std::int32_t>(num_pieces)};
      for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
        const Cut begin = cut_between(layout, run, piece, num_pieces);
        const Cut end = cut_between(layout, run, piece + 1, num_pieces);
        plan.pieces_.push_back({bucket_idx, cut_shards(layout, run, begin, end, owed)});
      }
      for (const std::int64_t slot_idx : run.slots) {
        plan.bucket_of_[static_cast<std::size_t>(slot_idx)] = bucket_idx;
      }
      bucket.slots = std::move(run.slots);
      plan.buckets_.push_back(std::move(bucket));
    }
  }
  return plan;
}

ByteRange range_between(const Layout& layout, const Cut& begin, const Cut& end) {
  return {bytes_of(layout, begin), bytes_of(layout, end)};
}

std::vector<SlotRun> runs_between(const Layout& layout, const Cut& begin, const Cut& end) {
  std::vector<SlotRun> runs;
  const auto& members = layout.arena_slots(slot_at(layout, begin.slot_idx).arena_idx);
  const auto by_offset = [&](std::int64_t a, std::int64_t b) {
    return slot_at(layout, a).offset_bytes < slot_at(layout, b).offset_bytes;
  };
  auto member = std::lower_bound(members.begin(), members.end(), begin.slot_idx, by_offset);
  while (*member != begin.slot_idx) ++member;  // past empty slots at the same offset
  for (; member != members.end(); ++member) {
    const std::int64_t first = *member == begin.slot_idx ? begin.element : 0;
    const bool is_last = *member == end.slot_idx;
    const std::int64_t last = is_last ? end.element : slot_at(layout, *member).num_elements;
    if (last > first) runs.push_back({*member, first, last});
    if (is_last) break;
  }
  return runs;
}

}  // namespace tradewind
