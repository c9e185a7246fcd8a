// A backward: gradients into buckets, buckets onto the wire.
#include <ATen/ops/_foreach_zero.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/collective_gradients.h"
#include "torch/parameter_checks.h"
#include "torch/slot_tensor.h"

namespace tradewind {

// --- backward ------------------------------------------------------------------------------------

void CollectiveGradients::arrive(std::size_t idx) {
  const std::scoped_lock lock(mutex_);
  check_alive();
  if (options_.settles_itself) open_backward(is_syncing_);
  // Hooks run for a gradient that is undefined, too: it counts as one that did not arrive.
  if (parameters_[idx].grad().defined()) is_used_[idx] = 1;
  if (options_.sums_microbatches) {
    begin();
    take_in(idx);
  }
  if (!is_syncing_) return;
  begin();
  ++num_arrived_[idx];
  if (!knows_expected_) {
    if (num_arrived_[idx] == 1) slot_arrivals_.push_back(idx);
    return;
  }
  if (num_arrived_[idx] > std::max(num_expected_[idx], 1)) {
    fail(ErrorKind::kBadState, "parameter '", names_[idx], "': its gradient arrived ",
         num_arrived_[idx], " times in this backward, but ", num_expected_[idx],
         " times in the first one, and has been sent already; call torch.utils.checkpoint with "
         "use_reentrant=False, or keep the structure of the first backward");
  }
  if (num_arrived_[idx] < num_expected_[idx]) return;
  if (!options_.sums_microbatches) take_in(idx);
  count_in(idx);
}

void CollectiveGradients::open_backward(bool syncs) {
  if (is_backward_open_ || !hooks_->may_run()) return;
  is_backward_open_ = true;
  is_syncing_ = syncs;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { under_autograd([&] { close_backward(); }); });
}

void CollectiveGradients::close_backward() {
  is_backward_open_ = false;
  if (!is_syncing_) {
    end_microbatch();
    return;
  }
  finish_backward();
  settle();
}

void CollectiveGradients::begin() {
  if (is_begun_) return;
  check_alive();
  if (num_rounds_ > 0) read_facts();
  num_contributors_ = num_contributors_next_ > 0 ? num_contributors_next_ : size_;
  is_begun_ = true;
  is_finished_ = has_facts_ = false;
  std::fill(num_arrived_.begin(), num_arrived_.end(), 0);
  std::fill(is_taken_.begin(), is_taken_.end(), std::uint8_t{0});
  arrivals_.clear();
  slot_arrivals_.clear();
  num_launched_ = 0;
  for (std::size_t bucket = 0; bucket < num_missing_.size(); ++bucket) {
    num_missing_[bucket] = static_cast<std::int64_t>(plan_.buckets()[bucket].slots.size());
    buckets_[bucket].streams.clear();
  }
}

void CollectiveGradients::take_in(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& parameter = parameters_[idx];
  const at::Tensor gradient = parameter.grad();
  const bool overwrites = !options_.sums_microbatches || is_taken_[idx] == 0;
  if (!gradient.defined()) {
    if (is_taken_[idx] == 0) zero(idx);  // or the mean of the round before would be sent
    return;
  }
  if (gradient.layout() != at::kStrided) {
    fail(ErrorKind::kBadState, "parameter '", names_[idx],
         "': expected a dense gradient, got one of layout ", gradient.layout(),
         "; use sparse=False in the embedding, or sum this parameter's gradients yourself");
  }
  check_gradient(parameter, gradient, names_[idx]);
  at::Tensor view = views_[idx];
  const bool is_there = gradient.is_same(view);
  if (!overwrites) {
    view.add_(gradient);
  } else if (!is_there) {
    view.copy_(gradient);
  }
  is_taken_[idx] = 1;
  if (options_.sums_microbatches) {
    parameter.mutable_grad().reset();
  } else if (!is_there) {
    parameter.mutable_grad() = view;
  }
}

void CollectiveGradients::zero(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  views_[idx].zero_();
}

// A parameter that this backward did not reach.
void CollectiveGradients::fill_missing(std::size_t idx) {
  const at::Tensor gradient = parameters_[idx].grad();
  if (options_.sums_microbatches) {
    if (is_taken_[idx] == 0) zero(idx);
    return;
  }
  if (!gradient.defined()) {
    zero(idx);
    return;
  }
  if (is_used_[idx] == 0) {  // of an earlier round; must survive if no rank used it
    kept_[idx] = gradient.is_same(views_[idx]) ? gradient.clone() : gradient;
  }
  take_in(idx);
}

void CollectiveGradients::count_in(std::size_t idx) {
  const std::int32_t bucket_idx = plan_.bucket_of(slot_of_[idx]);
  if (bucket_idx < 0) return;
  const auto b = static_cast<std::size_t>(bucket_idx);
  const c10::Stream stream = values_wire_->current_stream();
  auto& streams = buckets_[b].streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  if (--num_missing_[b] > 0) return;
  arrivals_.push_back(bucket_idx);
  launch_ready();
}

// Buckets go out in one order on all ranks, whatever the order in which they became full here.
void CollectiveGradients::launch_ready() {
  while (num_launched_ < order_.size() &&
         num_missing_[static_cast<std::size_t>(order_[num_launched_])] == 0) {
    launch(order_[num_launched_++]);
  }
}

void CollectiveGradients::launch(std::int32_t bucket_idx) {
  Bucket& bucket = buckets_[static_cast<std::size_t>(bucket_idx)];
  for (const c10::Stream& stream : bucket.streams) values_wire_->follow(stream);
  const auto divisor = static_cast<double>(num_contributors_);
  values_wire_->run([this, &bucket, divisor](void* stream) { reduce(bucket, divisor, stream); });
}

// --- a bucket, on the wire -----------------------------------------------------------------------

void CollectiveGradients::reduce(Bucket& bucket, double divisor, void* stream) {
  const c10::AutoGradMode no_grad(false);
  arithmetic_->note_sizes(bucket.slots, bucket.sizes);
  if (!values_) return;
  if (sent_.defined()) {
    reduce_in_parts(bucket, divisor, stream);
    return;
  }
  const BucketRun& run = bucket.run;
  // A sum of 16 bits could overflow where the mean does not.
  const bool divides_first = element_bytes(run.dtype) == 2;
  if (divides_first && divisor != 1.0) arithmetic_->divide(run, divisor, bucket.data, stream);
  values_->all_reduce(bucket.data, bucket.data, run.num_elements, run.dtype, Reduction::kSum,
                      stream);
  if (!divides_first && divisor != 1.0) arithmetic_->divide(run, divisor, bucket.data, stream);
}

// Every rank gets all ranks' values of its part, sums them in rank order, and sends the mean to
// all.
void CollectiveGradients::reduce_in_parts(Bucket& bucket, double divisor, void* stream) {
  const BucketRun& all = bucket.run;
  const bool is_lossy = all.codec != Codec::kNone;
  const std::int64_t begin = std::min(rank_ * bucket.part_elements, all.num_elements);
  BucketRun own = all;
  own.num_elements = std::min(bucket.part_elements, all.num_elements - begin);
  auto* sent = static_cast<std::byte*>(sent_.mutable_data_ptr());
  auto* received = static_cast<std::byte*>(received_.mutable_data_ptr());
  auto* mean = static_cast<std::byte*>(mean_part_.mutable_data_ptr());
  const auto error_of = [](const at::Tensor& error) {
    return error.defined() ? error.mutable_data_ptr<float>() : nullptr;
  };

  const std::int64_t num_bytes = all.num_elements * element_bytes(all.dtype);
  if (is_lossy) {
    // A block that was not finite has been decoded into them too, and would be so for ever.
    if (!bucket.gaps.empty()) at::_foreach_zero_(bucket.gaps);
    arithmetic_->encode(all, bucket.data, error_of(bucket.error), sent, stream);
  } else {
    arithmetic_->copy(bucket.data, sent, num_bytes, stream);
  }
  values_->all_to_all(sent, received, bucket.part_bytes, DType::kUInt8, stream);
  std::byte* part = mean;
  if (own.num_elements > 0) {
    arithmetic_->sum(own, {received, bucket.part_bytes, size_}, divisor, mean, stream);
  }
  if (is_lossy) {
    part = static_cast<std::byte*>(wire_part_.mutable_data_ptr());
    if (own.num_elements > 0) {
      arithmetic_->encode(own, mean, error_of(bucket.mean_error), part, stream);
    }
  }
  values_->all_gather(part, sent, bucket.part_bytes, DType::kUInt8, stream);
  if (is_lossy) {
    arithmetic_->decode(all, sent, bucket.data, stream);
  } else {
    arithmetic_->copy(sent, bucket.data, num_bytes, stream);
  }
}

// --- the end of backward -------------------------------------------------------------------------

void CollectiveGradients::finish_backward(bool has_next) {
  const std::scoped_lock lock(mutex_);
  const c10::DeviceGuard guard(device_);
  begin();
  if (is_finished_) return;
  std::vector<std::uint8_t> is_counted(parameters_.size());
  if (!knows_expected_) {
    for (const std::size_t idx : slot_arrivals_) {
      if (!options_.sums_microbatches) take_in(idx);
      count_in(idx);
      is_counted[idx] = 1;
    }
    num_expected_ = num_arrived_;
    knows_expected_ = true;
  } else {
    for (const std::size_t idx : parameter_of_) {
      is_counted[idx] = num_arrived_[idx] >= std::max(num_expected_[idx], 1) ? 1 : 0;
    }
  }
  // From the last parameter to the first, as backward would have it.
  for (auto idx = parameter_of_.rbegin(); idx != parameter_of_.rend(); ++idx) {
    if (is_counted[*idx] != 0) continue;
    fill_missing(*idx);
    count_in(*idx);
  }
  is_finished_ = true;
  publish_facts(has_next, true);
}

void CollectiveGradients::shadow_round(bool has_next) {
  const std::scoped_lock lock(mutex_);
  const c10::DeviceGuard guard(device_);
  begin();
  for (const std::size_t idx : parameter_of_) {
    zero(idx);
    if (!options_.sums_microbatches && parameters_[idx].grad().is_same(views_[idx])) {
      parameters_[idx].mutable_grad().reset();
    }
  }
  for (auto idx = parameter_of_.rbegin(); idx != parameter_of_.rend(); ++idx) count_in(*idx);
  is_finished_ = true;
  publish_facts(has_next, false);
}

void CollectiveGradients::end_microbatch() {
  const std::scoped_lock lock(mutex_);
  if (options_.sums_microbatches) {
    const c10::AutoGradMode no_grad(false);
    const c10::DeviceGuard guard(device_);
    begin();
    for (const std::size_t idx : parameter_of_) {
      if (is_taken_[idx] == 0) zero(idx);  // the mean of the round before is not of this microbatch
      is_taken_[idx] = 1;
    }
    for (Bucket& bucket : buckets_) arithmetic_->note_sizes(bucket.slots, bucket.sizes);
    note_nonfinite();
  }
  ++num_microbatches_;
}

void CollectiveGradients::abandon(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  num_microbatches_ = 0;
  is_backward_open_ = false;
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  if (is_begun_) fail_with(reason);
  is_begun_ = false;
}

}  // namespace tradewind
