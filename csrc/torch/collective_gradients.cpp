// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include "torch/collective_gradients.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/error.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

// How long the connections may take to close before they are left behind.
constexpr std::chrono::milliseconds kClosing{200};
// What a device still has to do for others may take longer.
constexpr std::chrono::seconds kFlushing{5};

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

CollectiveGradients::CollectiveGradients(const std::vector<at::Tensor>& parameters,
                                         std::vector<std::string> names,
                                         c10::intrusive_ptr<c10d::ProcessGroup> values,
                                         c10::intrusive_ptr<c10d::ProcessGroup> facts,
                                         std::shared_ptr<Board> board, Options options)
    : GradientRounds(parameters, std::move(names), parameters.at(0).device(), facts->getRank(),
                     facts->getSize(), options),
      options_(std::move(options)) {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device_);
  facts_ = std::make_unique<C10dComm>(std::move(facts), c10::Device(c10::kCPU), comm_options());
  if (values) values_ = std::make_unique<C10dComm>(std::move(values), device_, comm_options());
  presence_ = std::make_unique<Presence>(std::move(board), rank_, size_);
  arithmetic_ = make_bucket_arithmetic(device_, options_.cuda_library, options_.emulates_device);
  make_plan(make_layout(), options_.plan);
  for (const ArenaSpec& arena : layout_.arenas()) {
    arenas_.push_back(allocate_zeroed(arena.size_bytes, device_));
  }
  for (const std::size_t idx : parameter_of_) make_view(idx);
  make_buckets();
  make_staging();
  order_.resize(buckets_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::map<at::ScalarType, Buffers> by_dtype;
  for (const at::Tensor& buffer : options_.buffers) {
    if (buffer.numel() > 0) by_dtype[buffer.scalar_type()].tensors.push_back(buffer);
  }
  for (auto& [dtype, buffers] : by_dtype) buffers_.push_back(std::move(buffers));

  const auto end_all = [this](const std::exception& error) { fail_with(error.what()); };
  values_wire_ = std::make_unique<Wire>(device_, end_all);
  facts_wire_ = std::make_unique<Wire>(c10::Device(c10::kCPU), end_all);
  make_hooks();
}

CollectiveGradients::~CollectiveGradients() {
  drop_hooks();
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

Layout CollectiveGradients::make_layout() {
  std::vector<SlotSpec> specs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) continue;
    check_shareable(i, name_of(options_.codec));
    slot_of_[i] = static_cast<std::int64_t>(specs.size());
    parameter_of_.push_back(i);
    specs.push_back({names_[i], {num_real_elements(parameters_[i])}, slot_dtype(i)});
  }
  return Layout::make(specs);
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
        bucket.slots.push_back(row_over(arenas_[arena_idx].data + place.offset_bytes,
                                        num_real_elements(parameters_[idx]),
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

void CollectiveGradients::find_gaps(std::size_t bucket_idx) {
  Bucket& bucket = buckets_[bucket_idx];
  const std::int64_t element = element_bytes(bucket.run.dtype);
  const auto dtype = torch_dtype(bucket.run.dtype);
  std::byte* end = bucket.data;
  const auto note_gap = [&](std::byte* until) {
    if (until > end) bucket.gaps.push_back(row_over(end, (until - end) / element, dtype, device_));
  };
  for (auto slot = bucket.slots.rbegin(); slot != bucket.slots.rend(); ++slot) {  // by offset
    auto* begin = static_cast<std::byte*>(slot->mutable_data_ptr());
    note_gap(begin);
    end = begin + slot->nbytes();
  }
  note_gap(bucket.data + bucket.run.num_elements * element);
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
    if (is_lossy) find_gaps(static_cast<std::size_t>(&bucket - buckets_.data()));
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

// --- failure -------------------------------------------------------------------------------------

void CollectiveGradients::check_alive() {
  const std::scoped_lock lock(failure_mutex_);
  if (!failure_.empty()) fail(ErrorKind::kPeerLost, failure_);
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
