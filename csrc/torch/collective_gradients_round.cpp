// What ranks say of a round, and its end.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <numeric>
#include <span>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "torch/collective_gradients.h"
#include "torch/shared_gradients_impl.h"

namespace tradewind {

void CollectiveGradients::join(Wire& wire) {
  check_alive();
  try {
    wire.join();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorKind::kPeerLost, "rank ", rank_, " of ", size_, ": ", error.what());
  }
}

// --- what ranks say of a round -------------------------------------------------------------------

void CollectiveGradients::publish_facts(bool has_next, bool is_present) {
  RoundFacts facts;
  facts.is_present = is_present;
  facts.has_next = has_next;
  if (options_.settles_itself) facts.num_changes = num_changes();
  if (compares_weights_) facts.weights_digest = weights_digest();
  facts.is_used = is_used_;
  facts.order = arrivals_;
  own_facts_ = facts.packed();
  all_facts_.resize(own_facts_.size() * static_cast<std::size_t>(size_));
  if (size_ == 1) {
    all_facts_ = own_facts_;
  } else {
    facts_wire_->run([this](void* stream) {
      facts_->all_gather(own_facts_.data(), all_facts_.data(),
                         static_cast<std::int64_t>(own_facts_.size()), DType::kUInt8, stream);
    });
  }
  publish_nonfinite();
  publish_buffers();
}

// Which gradients were not finite first in this microbatch, by the sizes that buckets have noted.
void CollectiveGradients::note_nonfinite() {
  std::vector<at::Tensor> is_finite;
  for (const at::Tensor& sizes : sizes_) is_finite.push_back(sizes.isfinite());
  if (is_finite.empty()) return;
  at::Tensor found = found_in_.narrow(0, 0, positions_.numel());
  const at::Tensor is_new = at::cat(is_finite).logical_not().logical_and(found.eq(0));
  found.masked_fill_(is_new, num_microbatches_ + 1);
}

void CollectiveGradients::publish_nonfinite() {
  values_wire_->follow(values_wire_->current_stream());
  values_wire_->run([this](void* stream) {
    const c10::AutoGradMode no_grad(false);
    const std::int64_t num_positions = positions_.numel();
    if (num_positions == 0) {  // parameters without elements alone
      nonfinite_facts_ = at::zeros({size_, 3}, found_in_.options());
      return;
    }
    note_nonfinite();
    // Its last element is 0, for a round in which all are finite.
    const at::Tensor is_bad = found_in_.narrow(0, 0, num_positions).ne(0);
    const at::Tensor first = at::where(is_bad, positions_, num_positions).min();
    const at::Tensor microbatch = found_in_.index_select(0, first.reshape({1}));
    const at::Tensor own = at::stack({is_bad.sum(), first, microbatch.select(0, 0)});
    if (values_) {
      at::Tensor all = at::empty({size_, 3}, own.options());
      values_->all_gather(own.const_data_ptr(), all.mutable_data_ptr(), 3, DType::kInt64, stream);
      nonfinite_facts_ = all;
    } else {
      nonfinite_facts_ = own.reshape({1, 3});
    }
    found_in_.zero_();
  });
  has_nonfinite_ = false;
}

void CollectiveGradients::publish_buffers() {
  if (!values_ || buffers_.empty()) return;
  const c10::AutoGradMode no_grad(false);
  for (Buffers& buffers : buffers_) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& buffer : buffers.tensors) {
      flat.push_back(buffer.reshape({-1}).to(device_));
    }
    buffers.flat = at::cat(flat);
  }
  values_wire_->follow(values_wire_->current_stream());
  values_wire_->run([this](void* stream) {
    for (Buffers& buffers : buffers_) {
      values_->broadcast(buffers.flat.mutable_data_ptr(),
                         static_cast<std::int64_t>(buffers.flat.nbytes()), DType::kUInt8, 0,
                         stream);
    }
  });
  has_buffers_ = false;
}

void CollectiveGradients::take_buffers() {
  if (has_buffers_) return;
  has_buffers_ = true;
  if (rank_ == 0) return;
  join(*values_wire_);
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device_);
  for (Buffers& buffers : buffers_) {
    std::int64_t begin = 0;
    for (at::Tensor& buffer : buffers.tensors) {
      buffer.copy_(buffers.flat.narrow(0, begin, buffer.numel()).view(buffer.sizes()));
      begin += buffer.numel();
    }
  }
}

void CollectiveGradients::read_facts() {
  if (has_facts_) return;
  join(*facts_wire_);
  is_used_anywhere_.assign(parameters_.size(), 0);
  num_contributors_next_ = num_present_ = 0;
  first_present_ = -1;
  const std::size_t num_bytes = own_facts_.size();
  for (int rank = 0; rank < size_; ++rank) {
    RoundFacts facts = RoundFacts::unpacked(
        std::span(all_facts_).subspan(static_cast<std::size_t>(rank) * num_bytes, num_bytes),
        parameters_.size(), buckets_.size());
    if (options_.settles_itself) check_weights(rank, facts);
    num_contributors_next_ += facts.has_next ? 1 : 0;
    num_present_ += facts.is_present ? 1 : 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i) is_used_anywhere_[i] |= facts.is_used[i];
    if (rank == 0) order_ = std::move(facts.order);
  }
  has_facts_ = true;
  compares_weights_ = std::exchange(compares_next_, false);
}

// As SharedGradients::check_weights.
void CollectiveGradients::check_weights(int rank, const RoundFacts& facts) {
  if (!facts.is_present) return;
  const auto r = static_cast<std::size_t>(rank);
  num_changes_of_.resize(static_cast<std::size_t>(size_));
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
  fail_with(text.str());
  fail(ErrorKind::kPeerLost, text.str());
}

std::uint32_t CollectiveGradients::num_changes() const {
  std::uint32_t sum = 0;
  for (const std::size_t idx : parameter_of_) {
    sum += static_cast<std::uint32_t>(parameters_[idx]._version());
  }
  return sum;
}

// Waits for the device, in the rare round in which ranks compare.
std::uint64_t CollectiveGradients::weights_digest() const {
  constexpr std::uint64_t kPrime = 1099511628211ULL;  // FNV-1a
  std::uint64_t digest = 14695981039346656037ULL;
  for (const std::size_t idx : parameter_of_) {
    const at::Tensor values = dense_like(parameters_[idx]).cpu();
    const auto* bytes = static_cast<const std::uint8_t*>(values.const_data_ptr());
    for (std::size_t i = 0; i < values.nbytes(); ++i) digest = (digest ^ bytes[i]) * kPrime;
  }
  return digest;
}

// --- what was not finite -------------------------------------------------------------------------

at::Tensor CollectiveGradients::nonfinite_facts() {
  join(*values_wire_);
  if (!nonfinite_facts_.defined()) {
    fail(ErrorKind::kBadState, "nonfinite: expected a round that has been finished before it");
  }
  return nonfinite_facts_;
}

at::Tensor CollectiveGradients::found_inf() {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device_);
  return nonfinite_facts().select(1, 0).sum().gt(0).to(at::kFloat);
}

std::vector<CollectiveGradients::NonFinite> CollectiveGradients::nonfinite_of(
    const at::Tensor& facts) const {
  const at::Tensor here = facts.cpu().contiguous();
  const auto* rows = here.const_data_ptr<std::int64_t>();
  std::vector<NonFinite> found;
  for (int rank = 0; rank < here.size(0); ++rank, rows += 3) {
    if (rows[0] == 0) continue;
    const std::size_t idx = parameter_at_.at(static_cast<std::size_t>(rows[1]));
    found.push_back({rank, names_[idx], rows[2], rows[0]});
  }
  return found;
}

const std::vector<CollectiveGradients::NonFinite>& CollectiveGradients::nonfinite() {
  if (has_nonfinite_) return nonfinite_;
  nonfinite_ = nonfinite_of(nonfinite_facts());
  has_nonfinite_ = true;
  return nonfinite_;
}

std::int64_t CollectiveGradients::num_contributors_next() {
  read_facts();
  return num_contributors_next_;
}

// --- the end of a round --------------------------------------------------------------------------

std::int32_t CollectiveGradients::bucket_of(std::size_t idx) const {
  return slot_of_[idx] < 0 ? -1 : plan_.bucket_of(slot_of_[idx]);
}

std::vector<std::int64_t> CollectiveGradients::parameters_of(std::int32_t bucket_idx) const {
  std::vector<std::int64_t> found;
  for (const std::int64_t slot : plan_.buckets()[static_cast<std::size_t>(bucket_idx)].slots) {
    found.push_back(static_cast<std::int64_t>(parameter_of_[static_cast<std::size_t>(slot)]));
  }
  return found;
}

void CollectiveGradients::scale(double factor) {
  const c10::AutoGradMode no_grad(false);
  for (const std::size_t idx : parameter_of_) {
    const at::Tensor gradient = parameters_[idx].grad();
    if (options_.sums_microbatches && is_taken_[idx] != 0) views_[idx].mul_(factor);
    if (!options_.sums_microbatches && gradient.defined()) gradient.mul_(factor);
  }
}

void CollectiveGradients::assign(std::size_t idx) {
  at::Tensor kept = std::exchange(kept_[idx], at::Tensor());
  views_[idx].unsafeGetTensorImpl()->bump_version();
  if (views_[idx].scalar_type() != parameters_[idx].scalar_type()) return;
  if (is_used_anywhere_[idx] != 0) {
    parameters_[idx].mutable_grad() = views_[idx];
  } else if (kept.defined()) {
    parameters_[idx].mutable_grad() = kept;
  }
}

// What means are multiplied by where ranks ran out of data unannounced: they were counted in.
double CollectiveGradients::mean_factor() const {
  const std::int64_t wanted = divides_by_all_ ? size_ : num_present_;
  if (wanted == 0) return 1.0;
  return static_cast<double>(num_contributors_) / static_cast<double>(wanted);
}

void CollectiveGradients::settle() {
  if (!is_begun_) return;
  if (!is_finished_) {
    fail(ErrorKind::kBadState,
         "settle: expected finish_backward() before it, so that every bucket is sent");
  }
  read_facts();
  join(*values_wire_);
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device_);
  const double factor = mean_factor();
  for (const std::size_t idx : parameter_of_) {
    if (factor != 1.0) views_[idx].mul_(factor);
    assign(idx);
  }
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  num_microbatches_ = 0;
  is_begun_ = false;
  ++num_rounds_;
  for (const Bucket& bucket : buckets_) {
    const std::int64_t num_bytes = bucket.run.num_elements * element_bytes(bucket.run.dtype);
    sent_bytes_ +=
        sent_.defined() ? 2 * (size_ - 1) * bucket.part_bytes : 2 * (size_ - 1) * num_bytes / size_;
  }
}

CollectiveGradients::Statistics CollectiveGradients::statistics() {
  const Wire::Times values = values_wire_->times();
  Statistics found;
  found.num_rounds = num_rounds_;
  found.sent_bytes = sent_bytes_;
  found.busy_s = values.busy_s;
  found.waited_s = values.waited_s + facts_wire_->times().waited_s;
  return found;
}

std::map<std::string, at::Tensor> CollectiveGradients::feedback() const {
  std::map<std::string, at::Tensor> found;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (!buckets_[i].error.defined()) continue;
    found.emplace("bucket " + std::to_string(i), buckets_[i].error);
    found.emplace("bucket " + std::to_string(i) + " (mean)", buckets_[i].mean_error);
  }
  return found;
}

std::int64_t CollectiveGradients::memory_bytes() const {
  const auto& arenas = layout_.arenas();
  return std::accumulate(
      arenas.begin(), arenas.end(), std::int64_t{0},
      [](std::int64_t total, const ArenaSpec& arena) { return total + arena.size_bytes; });
}

}  // namespace tradewind
