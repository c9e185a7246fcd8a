// What ranks say of a round, and its end.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "torch/hot_measure.h"
#include "torch/shared_gradients.h"
#include "torch/shared_gradients_impl.h"

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

void SharedGradients::publish_facts(bool has_next, bool is_present) {
  RoundFacts facts;
  facts.num_nonfinite = num_nonfinite_;
  facts.first_nonfinite = first_nonfinite_;
  facts.microbatch = nonfinite_microbatch_;
  facts.is_present = is_present;
  facts.has_next = has_next;
  if (options_.settles_itself) facts.num_changes = num_changes();
  if (compares_weights_) facts.weights_digest = weights_digest();
  facts.is_used = is_used_;
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

void SharedGradients::read_facts() {
  if (has_facts_) return;
  all_nonfinite_.clear();
  is_used_anywhere_.assign(parameters_.size(), 0);
  num_contributors_next_ = num_present_ = 0;
  first_present_ = -1;
  for (int rank = 0; rank < plan_.world_size(); ++rank) {
    RoundFacts facts = RoundFacts::unpacked(exchange_->published(kFactsChannel, rank),
                                            parameters_.size(), plan_.buckets().size());
    if (options_.settles_itself) check_weights(rank, facts);
    num_contributors_next_ += facts.has_next ? 1 : 0;
    num_present_ += facts.is_present ? 1 : 0;
    if (facts.num_nonfinite > 0) {
      all_nonfinite_.push_back({rank, names_[static_cast<std::size_t>(facts.first_nonfinite)],
                                facts.microbatch, facts.num_nonfinite});
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) is_used_anywhere_[i] |= facts.is_used[i];
    if (rank == 0) exchange_->set_order(std::move(facts.order), std::move(facts.urgency));
  }
  has_facts_ = true;
  compares_weights_ = std::exchange(compares_next_, false);
}

// With an optimizer that is not ours, a rank that skipped a backward, or ran another one, has other
// weights from then on. Parameters that changed more often on one rank than on another (which is no
// error by itself: averages may be swapped in on one rank) have weights compared in the next round.
void SharedGradients::check_weights(int rank, const RoundFacts& facts) {
  if (!facts.is_present) return;  // has no data left, and takes no part in updates
  const auto r = static_cast<std::size_t>(rank);
  num_changes_of_.resize(static_cast<std::size_t>(plan_.world_size()));
  const std::uint32_t changed =
      facts.num_changes - std::exchange(num_changes_of_[r], facts.num_changes);
  if (first_present_ < 0) {
    first_present_ = rank;
    num_changed_first_ = changed;
    digest_of_first_ = facts.weights_digest;
  }
  if (changed != num_changed_first_) compares_next_ = true;
  if (!compares_weights_ || facts.weights_digest == digest_of_first_) return;
  std::ostringstream text;
  text << "rank " << first_present_ << " and rank " << rank << " have other weights than each "
       << "other: one of them has skipped a backward that shares, or run another one; all ranks "
       << "end";
  exchange_->fail_with(text.str());
  fail(ErrorKind::kPeerLost, text.str());
}

std::uint32_t SharedGradients::num_changes() const {
  std::uint32_t sum = 0;
  for (const std::size_t idx : parameter_of_) {
    sum += static_cast<std::uint32_t>(parameters_[idx]._version());
  }
  return sum;
}

std::uint64_t SharedGradients::weights_digest() const {
  constexpr std::uint64_t kPrime = 1099511628211ULL;  // FNV-1a
  std::uint64_t digest = 14695981039346656037ULL;
  for (const std::size_t idx : parameter_of_) {
    const at::Tensor values = dense_like(parameters_[idx]);
    const auto* bytes = static_cast<const std::uint8_t*>(values.const_data_ptr());
    for (std::size_t i = 0; i < values.nbytes(); ++i) digest = (digest ^ bytes[i]) * kPrime;
  }
  return digest;
}

const std::vector<SharedGradients::NonFinite>& SharedGradients::nonfinite() {
  read_facts();
  return all_nonfinite_;
}

std::int64_t SharedGradients::num_contributors_next() {
  read_facts();
  return num_contributors_next_;
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

std::int32_t SharedGradients::bucket_of(std::size_t idx) const {
  return slot_of_[idx] < 0 ? -1 : plan_.bucket_of(slot_of_[idx]);
}

std::vector<std::int64_t> SharedGradients::parameters_of(std::int32_t bucket_idx) const {
  std::vector<std::int64_t> found;
  for (const std::int64_t slot : plan_.buckets()[static_cast<std::size_t>(bucket_idx)].slots) {
    if (slot >= num_right_) found.push_back(static_cast<std::int64_t>(parameter_at(slot)));
  }
  return found;
}

void SharedGradients::assign(std::size_t idx) {
  if (is_assigned_[idx] != 0) return;
  is_assigned_[idx] = 1;
  at::Tensor kept = std::exchange(kept_[idx], at::Tensor());
  views_[idx].unsafeGetTensorImpl()->bump_version();
  if (options_.shards_update) {  // it is the parameter that has been written
    parameters_[idx].unsafeGetTensorImpl()->bump_version();
    return;
  }
  if (views_[idx].scalar_type() != parameters_[idx].scalar_type()) return;
  if (is_used_anywhere_[idx] != 0) {
    parameters_[idx].mutable_grad() = views_[idx];
  } else if (kept.defined()) {
    parameters_[idx].mutable_grad() = kept;
  }
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

void SharedGradients::scale(double factor) {
  const c10::AutoGradMode no_grad(false);
  for (const std::size_t idx : parameter_of_) {
    const at::Tensor gradient = parameters_[idx].grad();
    if (options_.sums_microbatches && is_taken_[idx] != 0) views_[idx].mul_(factor);
    if (!options_.sums_microbatches && gradient.defined()) gradient.mul_(factor);
  }
}

// What means are multiplied by where ranks ran out of data unannounced: they were counted in.
double SharedGradients::mean_factor() const {
  const std::int64_t wanted = divides_by_all_ ? plan_.world_size() : num_present_;
  if (options_.shards_update || wanted == 0) return 1.0;
  return static_cast<double>(num_contributors_) / static_cast<double>(wanted);
}

void SharedGradients::settle() {
  if (!is_begun_) return;
  if (!is_finished_) {
    fail(ErrorKind::kBadState,
         "settle: expected finish_backward() before it, so that every bucket is sent");
  }
  read_facts();
  turn_thin();
  exchange_->wait_all();
  const double factor = mean_factor();
  rebuild_thin(factor);
  const c10::AutoGradMode no_grad(false);
  for (const std::size_t idx : parameter_of_) {
    if (factor != 1.0 && !thin_[idx]) views_[idx].mul_(factor);
  }
  for (const std::size_t idx : parameter_of_) assign(idx);
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  num_microbatches_ = 0;
  is_begun_ = false;
  if (options_.shards_update) {
    shard_table_->drop_parts();
    if (!update_error_.empty()) fail(ErrorKind::kBadState, update_error_);
  }
}

void SharedGradients::give_measures(HotMeasure& hot, const std::vector<std::int64_t>& hot_idx_of) {
  exchange_->wait_summed();  // this rank's own blocks
  for (int peer = 0; peer < plan_.world_size(); ++peer) {
    const auto bytes = exchange_->published(kMeasuresChannel, peer);
    if (peer != rank_) measures_->take(peer, bytes);
  }
  for (const std::size_t idx : parameter_of_) {
    const std::int64_t hot_idx = hot_idx_of[idx];
    const at::Tensor gradient = options_.sums_microbatches || options_.shards_update
                                    ? views_[idx]
                                    : parameters_[idx].grad();
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

std::int64_t SharedGradients::memory_bytes() const {
  const auto& arenas = layout_.arenas();
  return std::accumulate(
      arenas.begin(), arenas.end(), std::int64_t{0},
      [](std::int64_t total, const ArenaSpec& arena) { return total + arena.size_bytes; });
}

}  // namespace tradewind
