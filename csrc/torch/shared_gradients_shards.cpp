// Updates of shards by their owners.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/shared_gradients.h"

namespace tradewind {

// What of each piece this rank updates.
void SharedGradients::find_fragments() {
  fragments_of_.resize(plan_.pieces().size());
  const auto rank = static_cast<std::size_t>(rank_);
  for (std::size_t piece = 0; piece < plan_.pieces().size(); ++piece) {
    const auto& cuts = plan_.pieces()[piece].cuts;
    for (const SlotRun& run : runs_between(layout_, cuts[rank], cuts[rank + 1])) {
      fragments_of_[piece].push_back(fragments_.size());
      fragments_.push_back({static_cast<std::int32_t>(piece),
                            static_cast<std::int64_t>(parameter_at(run.slot_idx)), run.begin,
                            run.end});
    }
  }
}

std::byte* SharedGradients::address_of(const Cut& cut) const {
  const at::Tensor& parameter = parameters_[parameter_at(cut.slot_idx)];
  const std::size_t bytes = parameter.element_size() / (parameter.is_complex() ? 2 : 1);
  return static_cast<std::byte*>(parameter.mutable_data_ptr()) +
         static_cast<std::size_t>(cut.element) * bytes;
}

void SharedGradients::set_shards(OptimizerTable& table,
                                 std::vector<std::size_t> table_idx_of_fragment) {
  shard_table_ = &table;
  table.set_parallel(kSerial);
  table_idx_of_fragment_ = std::move(table_idx_of_fragment);
}

void SharedGradients::release(std::vector<GroupOptions> groups, double gradient_multiplier,
                              bool is_vetoed) {
  read_facts();
  if (shard_table_ == nullptr) {
    fail(ErrorKind::kBadState, "release: expected set_shards() before it");
  }
  release_groups_ = std::move(groups);
  // As mean_factor() has it.
  release_multiplier_ = gradient_multiplier * static_cast<double>(num_contributors_) /
                        static_cast<double>(std::max<std::int64_t>(num_present_, 1));
  is_vetoed_ = is_vetoed;
  update_error_.clear();
  exchange_->release();
}

// On a thread of the exchange.
void SharedGradients::update_piece(std::int32_t piece_idx) {
  if (is_vetoed_) return;
  std::vector<std::size_t> found;
  for (const std::size_t fragment : fragments_of_[static_cast<std::size_t>(piece_idx)]) {
    const auto parameter = static_cast<std::size_t>(fragments_[fragment].parameter_idx);
    if (is_used_anywhere_[parameter] != 0) found.push_back(table_idx_of_fragment_[fragment]);
  }
  try {
    std::sort(found.begin(), found.end());
    shard_table_->sweep_part(found, release_groups_, release_multiplier_, false);
  } catch (const std::exception& error) {
    update_error_ = error.what();
  }
}

}  // namespace tradewind
