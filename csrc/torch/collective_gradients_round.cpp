// What ranks say of a round, and its end.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"
#include "torch/collective_gradients.h"

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

void CollectiveGradients::publish(RoundFacts facts) {
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

RoundFacts CollectiveGradients::facts_of(int rank) {
  const std::size_t num_bytes = own_facts_.size();
  return RoundFacts::unpacked(
      std::span(all_facts_).subspan(static_cast<std::size_t>(rank) * num_bytes, num_bytes),
      parameters_.size(), buckets_.size());
}

void CollectiveGradients::take_facts(int rank, RoundFacts& facts) {
  if (rank == 0) order_ = std::move(facts.order);
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

// --- the end of a round --------------------------------------------------------------------------

void CollectiveGradients::settle_round() {
  join(*values_wire_);
  const double factor = mean_factor();
  if (factor == 1.0) return;
  for (const std::size_t idx : parameter_of_) views_[idx].mul_(factor);
}

void CollectiveGradients::end_round() {
  ++num_rounds_;
  for (const Bucket& bucket : buckets_) {
    const std::int64_t num_bytes = bucket.run.num_elements * element_bytes(bucket.run.dtype);
    sent_bytes_ +=
        sent_.defined() ? 2 * (size_ - 1) * bucket.part_bytes : 2 * (size_ - 1) * num_bytes / size_;
  }
}

Exchange::Statistics CollectiveGradients::statistics() {
  const Wire::Times values = values_wire_->times();
  Exchange::Statistics found;
  found.num_rounds = num_rounds_;
  found.sent_bytes = sent_bytes_;
  found.busy_s = values.busy_s;
  found.waited_s = values.waited_s + facts_wire_->times().waited_s;
  return found;
}

std::map<std::string, at::Tensor> CollectiveGradients::feedback() {
  std::map<std::string, at::Tensor> found;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (!buckets_[i].error.defined()) continue;
    found.emplace("bucket " + std::to_string(i), buckets_[i].error);
    found.emplace("bucket " + std::to_string(i) + " (mean)", buckets_[i].mean_error);
  }
  return found;
}

}  // namespace tradewind
