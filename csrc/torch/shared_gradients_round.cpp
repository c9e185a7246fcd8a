// What ranks say of a round, and its end.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "torch/hot_measure.h"
#include "torch/shared_gradients.h"
#include "torch/shared_gradients_impl.h"
#include "torch/slot_tensor.h"

namespace tradewind {

// --- what ranks say of a round -------------------------------------------------------------------

std::vector<std::int32_t> SharedGradients::next_order() const {
  std::vector<std::int32_t> order = arrivals_;
  for (std::size_t bucket = 0; bucket < num_missing_.size(); ++bucket) {
    if (num_missing_[bucket] > 0) order.push_back(static_cast<std::int32_t>(bucket));
  }
  if (forward_rank_.empty()) return order;
  // What fits on the wire while backward runs goes as it comes, and one bucket more, so that this
  // can grow; the rest as the next forward needs it.
  std::size_t num_as_they_come = 1;
  std::int64_t pieces = 0;
  for (const std::int32_t bucket : order) {
    pieces += plan_.buckets()[static_cast<std::size_t>(bucket)].num_pieces;
    if (pieces > num_ahead_) break;
    ++num_as_they_come;
  }
  const auto rest =
      order.begin() + static_cast<std::ptrdiff_t>(std::min(num_as_they_come, order.size()));
  std::stable_sort(rest, order.end(), [&](std::int32_t a, std::int32_t b) {
    return forward_rank_[static_cast<std::size_t>(a)] < forward_rank_[static_cast<std::size_t>(b)];
  });
  return order;
}

void SharedGradients::publish(RoundFacts facts) {
  if (facts.is_present) num_ahead_ = exchange_->num_scattered();
  facts.num_nonfinite = num_nonfinite_;
  facts.first_nonfinite = first_nonfinite_;
  facts.microbatch = nonfinite_microbatch_;
  facts.order = next_order();
  facts.urgency = forward_rank_;
  exchange_->publish(kFactsChannel, facts.packed());
  publish_buffers();
}

void SharedGradients::publish_buffers() {
  std::vector<std::byte> bytes;
  for (const at::Tensor& buffer : options_.buffers) {
    if (rank_ > 0) break;
    const at::Tensor dense = buffer.contiguous();
    const auto* data = static_cast<const std::byte*>(dense.const_data_ptr());
    bytes.insert(bytes.end(), data, data + dense.nbytes());
  }
  exchange_->publish(kBuffersChannel, bytes);
}

void SharedGradients::take_buffers() {
  if (has_buffers_ || options_.buffers.empty()) return;
  has_buffers_ = true;
  if (rank_ == 0) return;
  const c10::AutoGradMode no_grad(false);
  const std::byte* bytes = exchange_->published(kBuffersChannel, 0).data();
  for (at::Tensor& buffer : options_.buffers) {
    at::Tensor dense = buffer.contiguous();
    std::memcpy(dense.mutable_data_ptr(), bytes, dense.nbytes());
    bytes += dense.nbytes();
    if (!dense.is_same(buffer)) buffer.copy_(dense);
  }
}

RoundFacts SharedGradients::facts_of(int rank) {
  return RoundFacts::unpacked(exchange_->published(kFactsChannel, rank), parameters_.size(),
                              plan_.buckets().size());
}

void SharedGradients::take_facts(int rank, RoundFacts& facts) {
  if (rank == 0) {
    all_nonfinite_.clear();
    exchange_->set_order(std::move(facts.order), std::move(facts.urgency));
  }
  if (facts.num_nonfinite == 0) return;
  all_nonfinite_.push_back({rank, names_[static_cast<std::size_t>(facts.first_nonfinite)],
                            facts.microbatch, facts.num_nonfinite});
}

const std::vector<SharedGradients::NonFinite>& SharedGradients::nonfinite() {
  read_facts();
  return all_nonfinite_;
}

void SharedGradients::set_forward_order(const std::vector<std::int64_t>& parameters) {
  const std::scoped_lock lock(mutex_);
  const auto num_buckets = static_cast<std::int32_t>(plan_.buckets().size());
  forward_rank_.assign(static_cast<std::size_t>(num_buckets), num_buckets);
  std::int32_t position = 0;
  for (const std::int64_t idx : parameters) {
    const std::int32_t bucket = bucket_of(static_cast<std::size_t>(idx));
    if (bucket < 0) continue;
    std::int32_t& rank = forward_rank_[static_cast<std::size_t>(bucket)];
    if (rank == num_buckets) rank = position++;
  }
}

// --- the end of a round --------------------------------------------------------------------------

void SharedGradients::assign(std::size_t idx) {
  if (is_assigned_[idx] != 0) return;
  is_assigned_[idx] = 1;
  if (!options_.shards_update) {
    GradientRounds::assign(idx);
    return;
  }
  kept_[idx].reset();
  views_[idx].unsafeGetTensorImpl()->bump_version();
  parameters_[idx].unsafeGetTensorImpl()->bump_version();  // it is what has been written
}

bool SharedGradients::is_mean_final() {
  read_facts();
  return num_present_ == num_contributors_;
}

void SharedGradients::assign_gradients() {
  read_facts();
  for (const std::size_t idx : parameter_of_) assign(idx);
}

void SharedGradients::settle_bucket(std::int32_t bucket_idx) {
  exchange_->wait(bucket_idx);
  if (!options_.shards_update) return;
  for (const std::int64_t idx : parameters_of(bucket_idx)) assign(static_cast<std::size_t>(idx));
}

void SharedGradients::settle_round() {
  turn_thin();
  exchange_->wait_all();
  const double factor = options_.shards_update ? 1.0 : mean_factor();
  rebuild_thin(factor);
  if (factor == 1.0) return;
  for (const std::size_t idx : parameter_of_) {
    if (!thin_[idx]) views_[idx].mul_(factor);
  }
}

void SharedGradients::end_round() {
  if (!options_.shards_update) return;
  shard_table_->drop_parts();
  if (!update_error_.empty()) fail(ErrorKind::kBadState, update_error_);
}

void SharedGradients::give_measures(HotMeasure& hot, const std::vector<std::int64_t>& hot_idx_of) {
  exchange_->wait_summed();  // this rank's own blocks
  for (int peer = 0; peer < plan_.world_size(); ++peer) {
    const auto bytes = exchange_->published(kMeasuresChannel, peer);
    if (peer != rank_) measures_->take(peer, bytes);
  }
  for (const std::size_t idx : parameter_of_) {
    const std::int64_t hot_idx = hot_idx_of[idx];
    const at::Tensor gradient =
        sums_microbatches_ || options_.shards_update ? views_[idx] : parameters_[idx].grad();
    if (hot_idx < 0 || !gradient.is_same(views_[idx])) continue;
    hot.measure_with(static_cast<std::size_t>(hot_idx), gradient, [&](std::span<BlockMeasure> to) {
      if (thin_[idx]) {  // every rank makes the whole of it
        kernels().measure[static_cast<int>(*arena_dtype(gradient.scalar_type()))](
            gradient.const_data_ptr(), gradient.numel(), to.data());
        return;
      }
      const auto blocks = measures_->of_slot(static_cast<std::size_t>(slot_of_[idx]));
      std::copy(blocks.begin(), blocks.end(), to.begin());
    });
  }
}

}  // namespace tradewind
