#include "torch/shared_gradients.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "torch/parameter_checks.h"
#include "torch/shared_gradients_impl.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

bool is_shared(const at::Tensor& parameter) { return parameter.requires_grad(); }

// A complex number travels as its two parts.
DType real_dtype(DType dtype) {
  if (dtype == DType::kComplex64) return DType::kFloat32;
  return dtype == DType::kComplex128 ? DType::kFloat64 : dtype;
}
DType real_dtype(const at::Tensor& values) {
  return real_dtype(*arena_dtype(values.scalar_type()));
}
std::int64_t num_real_elements(const at::Tensor& values) {
  return values.numel() * (values.is_complex() ? 2 : 1);
}

DType slot_dtype(DType dtype, bool sums) {
  return sums && real_dtype(dtype) != DType::kFloat64 ? DType::kFloat32 : real_dtype(dtype);
}

// Whether the second one's memory begins where the first one's ends, but for what aligns it.
bool is_right_behind(const at::Tensor& first, const at::Tensor& second) {
  constexpr std::ptrdiff_t kAlignment = 64;
  const auto* end = static_cast<const std::byte*>(first.const_data_ptr()) + first.nbytes();
  const std::ptrdiff_t gap = static_cast<const std::byte*>(second.const_data_ptr()) - end;
  return first.scalar_type() == second.scalar_type() && gap >= 0 && gap < kAlignment;
}

bool all_finite(const std::vector<BlockMeasure>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [](const BlockMeasure& block) { return std::isfinite(block.sum_of_squares); });
}

// Copies or adds a gradient into its slot; says whether what then lies there is finite.
bool copy_in(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
             std::int64_t num_elements, bool overwrites, const Parallel& parallel) {
  thread_local std::vector<BlockMeasure> blocks;
  blocks.resize(static_cast<std::size_t>(num_norm_blocks(num_elements)));
  BlockMeasure* measured = blocks.data();
  parallel.for_ranges(
      num_norm_blocks(num_elements), 16, [&](std::int64_t first, std::int64_t last) {
        const std::int64_t begin = first * kNormBlockElements;
        const std::int64_t count = std::min(last * kNormBlockElements, num_elements) - begin;
        const auto ingest = kernels().ingest[static_cast<int>(from_dtype)];
        if (to_dtype == DType::kFloat32 && ingest != nullptr) {
          ingest(from + begin * element_bytes(from_dtype), count, overwrites,
                 reinterpret_cast<float*>(to) + begin, measured + first);
          return;
        }
        std::byte* there = to + begin * element_bytes(to_dtype);
        if (from != to) {
          std::memcpy(there, from + begin * element_bytes(from_dtype),
                      static_cast<std::size_t>(count * element_bytes(to_dtype)));
        }
        kernels().measure[static_cast<int>(to_dtype)](there, count, measured + first);
      });
  return all_finite(blocks);
}

}  // namespace

SharedGradients::SharedGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 std::shared_ptr<Peers> peers, std::shared_ptr<Board> board,
                                 const Options& options)
    : parameters_(std::move(parameters)), names_(std::move(names)), options_(options) {
  const c10::AutoGradMode no_grad(false);
  rank_ = peers->rank();
  make_layout();
  if (options_.shards_update) {
    // What is spread at a time must be one run of the parameters' memory too.
    for (const std::size_t idx : parameter_of_) {
      const auto previous = options_.plan.slot_keys.size();
      const bool is_behind =
          previous > 0 &&
          is_right_behind(parameters_[parameter_of_[previous - 1]], parameters_[idx]);
      const std::int64_t last = previous == 0 ? 0 : options_.plan.slot_keys.back();
      options_.plan.slot_keys.push_back(is_behind ? last : last + 1);
    }
  }
  plan_ = Plan::make(layout_, peers->size(), options_.plan);
  Exchange::Memory memory{&layout_, {}};
  if (!options_.sockets.empty()) {
    options_.exchange.neighbours =
        meet_neighbours(layout_, plan_, options_.exchange.hosts, options_.sockets, rank_,
                        std::chrono::steady_clock::now() + options_.exchange.deadline);
  }
  for (const ArenaSpec& arena : layout_.arenas()) {
    arenas_.push_back(allocate_arena(arena.size_bytes));
    arena_data_.push_back(arenas_.back().data);
  }
  memory.arenas = arena_data_;
  views_.resize(parameters_.size());
  for (const std::size_t idx : parameter_of_) make_view(idx);

  const std::size_t num_buckets = plan_.buckets().size();
  is_used_.resize(parameters_.size());
  is_taken_.resize(parameters_.size());
  is_assigned_.resize(parameters_.size());
  num_arrived_.resize(parameters_.size());
  num_expected_.resize(parameters_.size());
  kept_.resize(parameters_.size());
  num_missing_.resize(num_buckets);

  Exchange::Callbacks callbacks;
  callbacks.on_late = options_.on_late;
  std::vector<std::vector<std::int64_t>> channels{
      std::vector<std::int64_t>(static_cast<std::size_t>(peers->size()),
                                RoundFacts::packed_bytes(parameters_.size(), num_buckets))};
  std::int64_t buffer_bytes = 0;
  for (const at::Tensor& buffer : options_.buffers) {
    buffer_bytes += static_cast<std::int64_t>(buffer.nbytes());
  }
  channels.emplace_back(static_cast<std::size_t>(peers->size()), 0)[0] = buffer_bytes;
  if (options_.measures) {
    measures_ = std::make_unique<MeanMeasures>(layout_, plan_, rank_);
    channels.push_back(measures_->bytes_by_rank());
    callbacks.on_sum = [this](std::int32_t piece_idx) {
      measures_->measure(piece_idx, arena_data_);
    };
    callbacks.on_all_summed = [this] { exchange_->publish(kMeasuresChannel, measures_->own()); };
  }
  num_contributors_next_ = peers->size();
  Exchange::Memory gathered = memory;
  if (options_.shards_update) {
    gathered.place = [this](const Cut& cut) { return address_of(cut); };
    callbacks.on_release = [this](std::int32_t piece_idx) { update_piece(piece_idx); };
    find_fragments();
  }
  exchange_ = std::make_unique<Exchange>(plan_, memory, std::move(gathered), std::move(peers),
                                         std::move(board), options_.exchange, std::move(callbacks),
                                         std::move(channels));
  std::vector<at::Tensor> hooked = parameters_;
  for (at::Tensor& parameter : hooked) {
    if (!is_shared(parameter)) parameter = at::Tensor();
  }
  hooks_ = std::make_unique<GradientHooks>(
      hooked, [this](std::size_t idx, const at::Tensor&) { under_autograd([&] { arrive(idx); }); },
      /*takes_complex=*/true);
  hooks_->install();
}

SharedGradients::~SharedGradients() = default;

void SharedGradients::check_codec(DType dtype, const std::string& name) const {
  const std::string_view codec =
      options_.low_rank > 0 ? "powersgd" : name_of(options_.exchange.codec);
  if (codec == name_of(Codec::kNone) || takes(Codec::kBfloat16, real_dtype(dtype))) return;
  fail(ErrorKind::kBadType, "codec '", codec,
       "': expected gradients of float32, bfloat16 or float16, got ", dtype_name(dtype),
       " of parameter '", name, "'; use codec='none'");
}

void SharedGradients::make_layout() {
  slot_of_.assign(parameters_.size(), -1);
  right_slot_of_.assign(parameters_.size(), -1);
  thin_.resize(parameters_.size());
  std::vector<SlotSpec> specs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_shared(parameters_[i])) continue;
    check_codec(check_parameter(parameters_[i], c10::Device(c10::kCPU), names_[i]), names_[i]);
    parameter_of_.push_back(i);
    thin_[i] = make_thin(i);
    if (!thin_[i]) continue;
    right_slot_of_[i] = static_cast<std::int64_t>(specs.size());
    specs.push_back({names_[i] + " (right)", {thin_[i]->shape().right_elements()}});
  }
  num_right_ = static_cast<std::int64_t>(specs.size());
  for (const std::size_t idx : parameter_of_) {
    slot_of_[idx] = static_cast<std::int64_t>(specs.size());
    if (thin_[idx]) {
      specs.push_back({names_[idx], {thin_[idx]->shape().left_elements()}});
      continue;
    }
    const at::Tensor& parameter = parameters_[idx];
    specs.push_back(
        {names_[idx],
         {num_real_elements(parameter)},
         slot_dtype(*arena_dtype(parameter.scalar_type()), options_.sums_microbatches)});
  }
  layout_ = Layout::make(specs);
  // The second halves of thin ones are ready only when the first ones have their means. Plans begin
  // with the last slots, so they come last.
  if (num_right_ == 0) return;
  for (std::size_t slot = 0; slot < specs.size(); ++slot) {
    options_.plan.slot_keys.push_back(static_cast<std::int64_t>(slot) < num_right_ ? 0 : 1);
  }
}

void SharedGradients::make_view(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_of_[idx])];
  if (thin_[idx]) {
    const auto dtype = options_.sums_microbatches ? at::kFloat : parameter.scalar_type();
    const ZeroedMemory memory = allocate_zeroed(
        parameter.numel() * static_cast<std::int64_t>(c10::elementSize(dtype)), c10::kCPU);
    views_[idx] = tensor_over(dense_like(parameter), dtype, memory.data, memory.keeper);
    return;
  }
  const ZeroedMemory& arena = arenas_[static_cast<std::size_t>(slot.arena_idx)];
  const auto dtype = parameter.is_complex() ? parameter.scalar_type() : torch_dtype(slot.dtype);
  views_[idx] =
      tensor_over(dense_like(parameter), dtype, arena.data + slot.offset_bytes, arena.keeper);
}

// The next arena's memory, where the neighbours see it if there are any.
ZeroedMemory SharedGradients::allocate_arena(std::int64_t size_bytes) const {
  const auto& neighbours = options_.exchange.neighbours;
  if (!neighbours) return allocate_zeroed(size_bytes, c10::Device(c10::kCPU));
  return {neighbours->arena(neighbours->own_place(), arenas_.size()), neighbours->own_memory()};
}

// --- backward ------------------------------------------------------------------------------------

template <class Body>
void SharedGradients::under_autograd(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (options_.throw_through_autograd) options_.throw_through_autograd(error);
    throw;
  }
}

void SharedGradients::arrive(std::size_t idx) {
  const std::scoped_lock lock(mutex_);
  if (is_deferred_) {
    fail(ErrorKind::kBadState,
         "a backward began while the update before it waits for its sums; call "
         "engine.backward(loss) or engine.step(loss) in place of loss.backward(), or "
         "engine.settle() before it");
  }
  if (options_.settles_itself) open_backward(is_syncing_);
  // Hooks run for a gradient that is undefined, too: it counts as one that did not arrive.
  if (parameters_[idx].grad().defined()) is_used_[idx] = 1;
  if (options_.sums_microbatches) {
    begin();
    take_in(idx);
    if (!is_syncing_) return;
  } else if (!is_syncing_) {
    return;
  }
  begin();
  ++num_arrived_[idx];
  if (!knows_expected_) {
    if (num_arrived_[idx] == 1) slot_arrivals_.push_back(static_cast<std::int64_t>(idx));
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

void SharedGradients::open_backward(bool syncs) {
  if (is_backward_open_ || !hooks_->may_run()) return;
  is_backward_open_ = true;
  is_syncing_ = syncs;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { under_autograd([&] { close_backward(); }); });
}

void SharedGradients::close_backward() {
  is_backward_open_ = false;
  if (!is_syncing_) {
    end_microbatch();
    return;
  }
  finish_backward();
  settle();
}

void SharedGradients::begin() {
  if (is_begun_) return;
  if (exchange_->statistics().num_rounds > 0) read_facts();
  num_contributors_ = num_contributors_next_ > 0 ? num_contributors_next_ : plan_.world_size();
  exchange_->begin(num_contributors_);
  is_begun_ = true;
  is_finished_ = has_facts_ = is_shadow_ = false;
  has_buffers_ = false;
  std::fill(num_arrived_.begin(), num_arrived_.end(), 0);
  std::fill(is_taken_.begin(), is_taken_.end(), std::uint8_t{0});
  std::fill(is_assigned_.begin(), is_assigned_.end(), std::uint8_t{0});
  arrivals_.clear();
  slot_arrivals_.clear();
  for (std::size_t bucket = 0; bucket < num_missing_.size(); ++bucket) {
    num_missing_[bucket] = static_cast<std::int64_t>(plan_.buckets()[bucket].slots.size());
  }
  is_nonfinite_.assign(parameters_.size(), 0);
  first_nonfinite_ = -1;
  num_nonfinite_ = 0;
}

void SharedGradients::take_in(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& parameter = parameters_[idx];
  at::Tensor gradient = parameter.grad();
  if (!gradient.defined()) {
    if (is_taken_[idx] == 0) zero(idx);  // or the mean of the round before would be sent
    return;
  }
  if (gradient.layout() != at::kStrided) {
    fail(ErrorKind::kBadState, "parameter '", names_[idx],
         "': expected a dense gradient, got one of "
         "layout ",
         gradient.layout(),
         "; use sparse=False in the embedding, or sum this "
         "parameter's gradients yourself");
  }
  check_gradient(parameter, gradient, names_[idx]);
  const at::Tensor& view = views_[idx];
  const bool is_there = gradient.is_same(view);
  if (!is_there && (!same_layout(gradient, view) || is_lazy_view(gradient))) {
    gradient = gradient.new_empty_strided(view.sizes(), view.strides()).copy_(gradient);
  }
  const DType dtype = real_dtype(view);
  const std::int64_t num_elements = num_real_elements(view);
  const bool overwrites = !options_.sums_microbatches || is_taken_[idx] == 0;
  auto* to = static_cast<std::byte*>(view.mutable_data_ptr());
  bool is_finite = true;
  if (!overwrites && dtype != DType::kFloat32) {
    view.add_(gradient);
    is_finite = copy_in(to, dtype, to, dtype, num_elements, true, kSerial);
  } else {
    is_finite =
        copy_in(static_cast<const std::byte*>(gradient.const_data_ptr()), real_dtype(gradient), to,
                dtype, num_elements, overwrites, pool_for(num_elements));
  }
  is_taken_[idx] = 1;
  if (!is_finite && is_nonfinite_[idx] == 0) {
    is_nonfinite_[idx] = 1;
    ++num_nonfinite_;
    if (first_nonfinite_ < 0) {
      first_nonfinite_ = static_cast<std::int64_t>(idx);
      nonfinite_microbatch_ = num_microbatches_ + 1;
    }
  }
  if (options_.sums_microbatches) {
    parameter.mutable_grad().reset();
  } else if (!is_there) {
    parameter.mutable_grad() = view;
  }
}

void SharedGradients::zero(std::size_t idx) {
  std::memset(views_[idx].mutable_data_ptr(), 0, views_[idx].nbytes());
}

// A parameter that this backward did not reach.
void SharedGradients::fill_missing(std::size_t idx) {
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

void SharedGradients::count_in(std::size_t idx) {
  if (thin_[idx]) project(idx);
  if (options_.exchange.codec != Codec::kNone) zero_gap_behind(slot_of_[idx]);
  count_slot(slot_of_[idx]);
}

// What a lossy codec decoded of a block that was not finite lies between slots too, where no
// gradient overwrites it, and would spoil the block for ever.
void SharedGradients::zero_gap_behind(std::int64_t slot_idx) {
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_idx)];
  const std::int64_t end = slot.offset_bytes + slot.size_bytes();
  constexpr std::int64_t kAlignment = LayoutOptions{}.slot_alignment_bytes;
  const std::int64_t gap = (kAlignment - end % kAlignment) % kAlignment;
  std::memset(arena_data_[static_cast<std::size_t>(slot.arena_idx)] + end, 0,
              static_cast<std::size_t>(gap));
}

void SharedGradients::count_slot(std::int64_t slot_idx) {
  const std::int32_t bucket = plan_.bucket_of(slot_idx);
  if (bucket < 0) return;
  if (--num_missing_[static_cast<std::size_t>(bucket)] > 0) return;
  arrivals_.push_back(bucket);
  exchange_->ready(bucket);
}

void SharedGradients::finish_backward(bool has_next) {
  const std::scoped_lock lock(mutex_);
  begin();
  if (is_finished_) return;
  std::vector<std::uint8_t> is_counted(parameters_.size());
  if (!knows_expected_) {
    for (const std::int64_t arrived : slot_arrivals_) {
      const auto idx = static_cast<std::size_t>(arrived);
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
  num_ahead_ = exchange_->num_scattered();
  is_finished_ = true;
  publish_facts(has_next, true);
}

void SharedGradients::shadow_round(bool has_next) {
  const std::scoped_lock lock(mutex_);
  begin();
  is_shadow_ = true;
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

void SharedGradients::abandon(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  num_microbatches_ = 0;
  is_backward_open_ = false;
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  if (is_begun_) exchange_->fail_with(reason);
  is_begun_ = false;
}

}  // namespace tradewind
