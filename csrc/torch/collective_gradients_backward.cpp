// A backward: gradients into buckets, buckets onto the wire.
#include <ATen/ops/_foreach_zero.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "torch/collective_gradients.h"

namespace tradewind {

// --- backward ------------------------------------------------------------------------------------

void CollectiveGradients::begin_round() {
  check_alive();
  num_launched_ = 0;
  for (Bucket& bucket : buckets_) bucket.streams.clear();
}

void CollectiveGradients::ingest(std::size_t idx, at::Tensor gradient, bool overwrites) {
  at::Tensor& view = views_[idx];
  if (!overwrites) {
    view.add_(gradient);
  } else if (!gradient.is_same(view)) {
    view.copy_(gradient);
  }
}

void CollectiveGradients::zero(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  views_[idx].zero_();
}

void CollectiveGradients::count_in(std::size_t idx) {
  const std::int32_t bucket_idx = plan_.bucket_of(slot_of_[idx]);
  if (bucket_idx < 0) return;
  const auto b = static_cast<std::size_t>(bucket_idx);
  const c10::Stream stream = values_wire_->current_stream();
  auto& streams = buckets_[b].streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  if (fill_slot(slot_of_[idx]) >= 0) launch_ready();
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

void CollectiveGradients::end_microbatch() {
  const std::scoped_lock lock(mutex_);
  if (sums_microbatches_) {
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

}  // namespace tradewind
