// The measures of shared means: each rank takes those of its own shards while they are hot, and
// tells them to the others, so that every rank knows the same numbers of all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "arena/layout.h"
#include "share/plan.h"
#include "step/kernels.h"

namespace tradewind {

class MeanMeasures {
 public:
  // Both outlive this.
  MeanMeasures(const Layout& layout, const Plan& plan, int rank);

  // What each rank tells.
  [[nodiscard]] std::vector<std::int64_t> bytes_by_rank() const;
  // This rank's shard of a piece; `arenas` hold the layout.
  void measure(std::int32_t piece_idx, std::span<std::byte* const> arenas);
  // Of all pieces, to be told; valid until the next call.
  std::span<const std::byte> own();
  void take(int rank, std::span<const std::byte> bytes);

  [[nodiscard]] std::span<const BlockMeasure> of_slot(std::size_t slot_idx) const {
    return blocks_[slot_idx];
  }

 private:
  // Calls visit(the blocks of a run, the run) for each run of a rank's shards.
  template <class Visit>
  void visit_shards(int rank, const Visit& visit);
  std::span<BlockMeasure> blocks_of(const SlotRun& run);

  const Layout& layout_;
  const Plan& plan_;
  int rank_;
  std::vector<std::vector<BlockMeasure>> blocks_;  // by slot
  std::vector<std::byte> own_;
};

}  // namespace tradewind
