// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include "torch/collective_gradients.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/error.h"
#include "torch/parameter_checks.h"
#include "torch/shared_gradients_impl.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

// How long the connections may take to close before they are left behind.
constexpr std::chrono::milliseconds kClosing{200};
// What a device still has to do for others may take longer.
constexpr std::chrono::seconds kFlushing{5};

// A complex number travels as its two parts.
DType dtype_on_wire(const at::Tensor& values, bool sums) {
  DType dtype = *arena_dtype(values.scalar_type());
  if (dtype == DType::kComplex64) dtype = DType::kFloat32;
  if (dtype == DType::kComplex128) dtype = DType::kFloat64;
  return sums && dtype != DType::kFloat64 ? DType::kFloat32 : dtype;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

CollectiveGradients::CollectiveGradients(std::vector<at::Tensor> parameters,
                                         std::vector<std::string> names,
                                         c10::intrusive_ptr<c10d::ProcessGroup> values,
                                         c10::intrusive_ptr<c10d::ProcessGroup> facts,
                                         std::shared_ptr<Board> board, Options options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      options_(std::move(options)),
      device_(parameters_.at(0).device()) {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device_);
  facts_ = std::make_unique<C10dComm>(std::move(facts), c10::Device(c10::kCPU), comm_options());
  rank_ = facts_->rank();
  size_ = facts_->size();
  if (values) values_ = std::make_unique<C10dComm>(std::move(values), device_, comm_options());
  presence_ = std::make_unique<Presence>(std::move(board), rank_, size_);
  arithmetic_ = make_bucket_arithmetic(device_, options_.cuda_library, options_.emulates_device);
  make_layout();
  plan_ = Plan::make(layout_, size_, options_.plan);
  for (const ArenaSpec& arena : layout_.arenas()) {
    arenas_.push_back(allocate_zeroed(arena.size_bytes, device_));
  }
  views_.resize(parameters_.size());
  for (const std::size_t idx : parameter_of_) make_view(idx);
  make_buckets();
  make_staging();
  is_used_.resize(parameters_.size());
  is_taken_.resize(parameters_.size());
  num_arrived_.resize(parameters_.size());
  num_expected_.resize(parameters_.size());
  kept_.resize(parameters_.size());
  num_missing_.resize(buckets_.size());
  order_.resize(buckets_.size());
  std::iota(order_.begin(), order_.end(), 0);
  num_contributors_next_ = size_;
  std::map<at::ScalarType, Buffers> by_dtype;
  for (const at::Tensor& buffer : options_.buffers) {
    if (buffer.numel() > 0) by_dtype[buffer.scalar_type()].tensors.push_back(buffer);
  }
  for (auto& [dtype, buffers] : by_dtype) buffers_.push_back(std::move(buffers));

  const auto end_all = [this](const std::exception& error) { fail_with(error.what()); };
  values_wire_ = std::make_unique<Wire>(device_, end_all);
  facts_wire_ = std::make_unique<Wire>(c10::Device(c10::kCPU), end_all);
  std::vector<at::Tensor> hooked = parameters_;
  for (at::Tensor& parameter : hooked) {
    if (!parameter.requires_grad()) parameter = at::Tensor();
  }
  hooks_ = std::make_unique<GradientHooks>(
      hooked, [this](std::size_t idx, const at::Tensor&) { under_autograd([&] { arrive(idx); }); },
      /*takes_complex=*/true);
  hooks_->install();
}

CollectiveGradients::~CollectiveGradients() {
  hooks_.reset();
  presence_->leave("has left");
  if (!device_.is_cpu() && values_) end_quietly();
  // What is still under way ends at once: nobody will ask for it.
  for (const auto& comm : {values_.get(), facts_.get()}) {
    try {
      if (comm != nullptr) comm->abort(std::chrono::steady_clock::now() + kClosing);
    } catch (const Error&) {  // left behind
    }
  }
}

// The host may be a step ahead of the device, whose last calls other ranks wait for.
void CollectiveGradients::end_quietly() noexcept {
  try {
    check_alive();
    const c10::DeviceGuard guard(device_);
    values_wire_->join();
    const c10::Stream stream = values_wire_->current_stream();
    values_->wait(stream.native_handle(), std::chrono::steady_clock::now() + options_.deadline);
    values_->close(std::chrono::steady_clock::now() + kFlushing);
  } catch (...) {  // ended before, or left behind
  }
}

C10dCommOptions CollectiveGradients::comm_options() {
  C10dCommOptions options;
  options.timeout = options_.deadline;
  options.patience = options_.patience;
  options.on_late = options_.on_late;
  options.others = [this] { return presence_->others(); };
  options.why_ended = [this] { return presence_->why_ended(); };
  return options;
}

void CollectiveGradients::make_layout() {
  slot_of_.assign(parameters_.size(), -1);
  std::vector<SlotSpec> specs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.requires_grad()) continue;
    check_parameter(parameter, device_, names_[i]);
    slot_of_[i] = static_cast<std::int64_t>(specs.size());
    parameter_of_.push_back(i);
    const DType dtype = dtype_on_wire(parameter, options_.sums_microbatches);
    if (!takes(options_.codec, dtype)) {
      fail(ErrorKind::kBadType, "parameter '", names_[i], "': codec '", name_of(options_.codec),
           "' takes float32, bfloat16 and float16, got ", dtype_text(parameter.scalar_type()),
           "; use codec='none'");
    }
    specs.push_back({names_[i], {parameter.numel() * (parameter.is_complex() ? 2 : 1)}, dtype});
  }
  layout_ = Layout::make(specs);
}

void CollectiveGradients::make_view(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_of_[idx])];
  const ZeroedMemory& arena = arenas_[static_cast<std::size_t>(slot.arena_idx)];
  const auto dtype = parameter.is_complex() ? parameter.scalar_type() : torch_dtype(slot.dtype);
  views_[idx] =
      tensor_over(dense_like(parameter), dtype, arena.data + slot.offset_bytes, arena.keeper);
}

void CollectiveGradients::make_buckets() {
  std::vector<std::int64_t> num_slots(arenas_.size());
  for (const PlanBucket& planned : plan_.buckets()) {
    num_slots[static_cast<std::size_t>(planned.arena_idx)] +=
        static_cast<std::int64_t>(planned.slots.size());
  }
  const auto on_device = at::TensorOptions().device(device_);
  for (std::size_t arena = 0; arena < arenas_.size(); ++arena) {
    sizes_.push_back(
        at::zeros({num_slots[arena]}, on_device.dtype(torch_dtype(layout_.arenas()[arena].dtype))));
  }
  const auto& pieces = plan_.pieces();
  buckets_.resize(plan_.buckets().size());
  for (std::size_t arena_idx = 0; arena_idx < arenas_.size(); ++arena_idx) {
    std::int64_t num_before = 0;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      const PlanBucket& planned = plan_.buckets()[i];
      if (static_cast<std::size_t>(planned.arena_idx) != arena_idx) continue;
      Bucket& bucket = buckets_[i];
      const auto first = static_cast<std::size_t>(planned.first_piece_idx);
      const auto last = first + static_cast<std::size_t>(planned.num_pieces) - 1;
      const ByteRange range =
          range_between(layout_, pieces[first].cuts.front(), pieces[last].cuts.back());
      bucket.run.codec = options_.codec;
      bucket.run.dtype = layout_.arenas()[arena_idx].dtype;
      bucket.run.num_elements = range.size_bytes() / element_bytes(bucket.run.dtype);
      bucket.data = arenas_[arena_idx].data + range.begin_bytes;
      for (auto slot = planned.slots.rbegin(); slot != planned.slots.rend(); ++slot) {
        const std::size_t idx = parameter_of_[static_cast<std::size_t>(*slot)];
        const Slot& place = layout_.slots()[static_cast<std::size_t>(*slot)];
        parameter_at_.push_back(idx);
        // SAFETY: the arena outlives the bucket.
        bucket.slots.push_back(
            row_over(arenas_[arena_idx].data + place.offset_bytes,
                     parameters_[idx].numel() * (parameters_[idx].is_complex() ? 2 : 1),
                     torch_dtype(place.dtype), device_));
      }
      const auto num_here = static_cast<std::int64_t>(bucket.slots.size());
      bucket.sizes = sizes_[arena_idx].narrow(0, num_before, num_here);
      num_before += num_here;
    }
  }
  const auto num_positions = static_cast<std::int64_t>(parameter_at_.size());
  positions_ = at::arange(num_positions, on_device.dtype(at::kLong));
  found_in_ = at::zeros({num_positions + 1}, on_device.dtype(at::kLong));
}

// Memory for what travels in parts, where anything does.
void CollectiveGradients::make_staging() {
  const bool is_lossy = options_.codec != Codec::kNone;
  if (!values_ || !(is_lossy || options_.is_deterministic)) return;
  std::int64_t largest_part = 0;
  std::int64_t largest_mean = 0;
  for (Bucket& bucket : buckets_) {
    // Whole codec blocks, so that the parts of all ranks lie back to back.
    bucket.part_elements =
        round_up((bucket.run.num_elements + size_ - 1) / size_, kCodecBlockElements);
    bucket.part_bytes = wire_bytes(bucket.run.codec, bucket.run.dtype, bucket.part_elements);
    largest_part = std::max(largest_part, bucket.part_bytes);
    largest_mean = std::max(largest_mean, bucket.part_elements * element_bytes(bucket.run.dtype));
    if (!is_lossy || !options_.error_feedback) continue;
    const auto floats = at::TensorOptions().dtype(at::kFloat).device(device_);
    bucket.error = at::zeros({bucket.run.num_elements}, floats);
    bucket.mean_error = at::zeros({bucket.part_elements}, floats);
  }
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(device_);
  sent_ = at::zeros({size_ * largest_part}, bytes);
  received_ = at::zeros({size_ * largest_part}, bytes);
  mean_part_ = at::zeros({largest_mean}, bytes);
  wire_part_ = at::zeros({largest_part}, bytes);
}

// --- backward ------------------------------------------------------------------------------------

template <class Body>
void CollectiveGradients::under_autograd(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (options_.throw_through_autograd) options_.throw_through_autograd(error);
    throw;
  }
}

void CollectiveGradients::check_alive() {
  const std::scoped_lock lock(failure_mutex_);
  if (!failure_.empty()) fail(ErrorKind::kPeerLost, failure_);
}

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

void CollectiveGradients::fail_with(const std::string& reason) noexcept {
  try {
    const std::string text = reason.empty() ? "sharing was ended" : reason;
    {
      const std::scoped_lock lock(failure_mutex_);
      if (!failure_.empty()) return;
      failure_ = text;
    }
    presence_->end(text);
    const auto error = std::make_exception_ptr(Error(ErrorKind::kPeerLost, text));
    for (const auto& wire : {values_wire_.get(), facts_wire_.get()}) wire->stop(error);
    for (const auto& comm : {values_.get(), facts_.get()}) {
      if (comm != nullptr) comm->abort(std::chrono::steady_clock::now() + kClosing);
    }
  } catch (...) {  // out of memory, or connections that are left behind
  }
}

}  // namespace tradewind
