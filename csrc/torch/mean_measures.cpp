#include "torch/mean_measures.h"

#include <cstring>

namespace tradewind {

MeanMeasures::MeanMeasures(const Layout& layout, const Plan& plan, int rank)
    : layout_(layout), plan_(plan), rank_(rank) {
  for (const Slot& slot : layout.slots()) {
    blocks_.emplace_back(static_cast<std::size_t>(num_norm_blocks(slot.num_elements)));
  }
}

std::span<BlockMeasure> MeanMeasures::blocks_of(const SlotRun& run) {
  return std::span(blocks_[static_cast<std::size_t>(run.slot_idx)])
      .subspan(static_cast<std::size_t>(run.begin / kNormBlockElements),
               static_cast<std::size_t>(num_norm_blocks(run.end - run.begin)));
}

template <class Visit>
void MeanMeasures::visit_shards(int rank, const Visit& visit) {
  const auto at = static_cast<std::size_t>(rank);
  for (const PlanPiece& piece : plan_.pieces()) {
    for (const SlotRun& run : runs_between(layout_, piece.cuts[at], piece.cuts[at + 1])) {
      visit(blocks_of(run));
    }
  }
}

std::vector<std::int64_t> MeanMeasures::bytes_by_rank() const {
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(plan_.world_size()));
  for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
    for (const PlanPiece& piece : plan_.pieces()) {
      for (const SlotRun& run : runs_between(layout_, piece.cuts[rank], piece.cuts[rank + 1])) {
        bytes[rank] +=
            num_norm_blocks(run.end - run.begin) * static_cast<std::int64_t>(sizeof(BlockMeasure));
      }
    }
  }
  return bytes;
}

void MeanMeasures::measure(std::int32_t piece_idx, std::span<std::byte* const> arenas) {
  const PlanPiece& piece = plan_.pieces()[static_cast<std::size_t>(piece_idx)];
  const auto rank = static_cast<std::size_t>(rank_);
  for (const SlotRun& run : runs_between(layout_, piece.cuts[rank], piece.cuts[rank + 1])) {
    const Slot& slot = layout_.slots()[static_cast<std::size_t>(run.slot_idx)];
    const std::byte* values = arenas[static_cast<std::size_t>(slot.arena_idx)] + slot.offset_bytes +
                              run.begin * element_bytes(slot.dtype);
    kernels().measure[static_cast<int>(slot.dtype)](values, run.end - run.begin,
                                                    blocks_of(run).data());
  }
}

std::span<const std::byte> MeanMeasures::own() {
  own_.clear();
  visit_shards(rank_, [&](std::span<BlockMeasure> blocks) {
    const auto bytes = std::as_bytes(blocks);
    own_.insert(own_.end(), bytes.begin(), bytes.end());
  });
  return own_;
}

void MeanMeasures::take(int rank, std::span<const std::byte> bytes) {
  visit_shards(rank, [&](std::span<BlockMeasure> blocks) {
    std::memcpy(blocks.data(), bytes.data(), blocks.size_bytes());
    bytes = bytes.subspan(blocks.size_bytes());
  });
}

}  // namespace tradewind
