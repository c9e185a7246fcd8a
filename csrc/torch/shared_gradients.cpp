#include "torch/shared_gradients.h"

#include <c10/core/GradMode.h>

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
    : GradientRounds(std::move(parameters), std::move(names), c10::Device(c10::kCPU), peers->rank(),
                     peers->size(), options),
      options_(options) {
  const c10::AutoGradMode no_grad(false);
  Layout layout = make_layout();
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
  make_plan(std::move(layout), options_.plan);
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
  for (const std::size_t idx : parameter_of_) {
    if (thin_[idx]) {
      make_thin_view(idx);
    } else {
      make_view(idx);
    }
  }
  is_assigned_.resize(parameters_.size());

  Exchange::Callbacks callbacks;
  callbacks.on_late = options_.on_late;
  std::vector<std::vector<std::int64_t>> channels{std::vector<std::int64_t>(
      static_cast<std::size_t>(peers->size()),
      RoundFacts::packed_bytes(parameters_.size(), plan_.buckets().size()))};
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
  Exchange::Memory gathered = memory;
  if (options_.shards_update) {
    gathered.place = [this](const Cut& cut) { return address_of(cut); };
    callbacks.on_release = [this](std::int32_t piece_idx) { update_piece(piece_idx); };
    find_fragments();
  }
  exchange_ = std::make_unique<Exchange>(plan_, memory, std::move(gathered), std::move(peers),
                                         std::move(board), options_.exchange, std::move(callbacks),
                                         std::move(channels));
  make_hooks();
}

SharedGradients::~SharedGradients() { drop_hooks(); }

Layout SharedGradients::make_layout() {
  right_slot_of_.assign(parameters_.size(), -1);
  thin_.resize(parameters_.size());
  const std::string_view codec =
      options_.low_rank > 0 ? "powersgd" : name_of(options_.exchange.codec);
  std::vector<SlotSpec> specs;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) continue;
    check_shareable(i, codec);
    parameter_of_.push_back(i);
    thin_[i] = make_thin(i);
    if (!thin_[i]) continue;
    right_slot_of_[i] = static_cast<std::int64_t>(specs.size());
    specs.push_back({names_[i] + " (right)", {thin_[i]->shape().right_elements()}});
  }
  first_slot_ = static_cast<std::int64_t>(specs.size());
  for (const std::size_t idx : parameter_of_) {
    slot_of_[idx] = static_cast<std::int64_t>(specs.size());
    if (thin_[idx]) {
      specs.push_back({names_[idx], {thin_[idx]->shape().left_elements()}});
    } else {
      specs.push_back({names_[idx], {num_real_elements(parameters_[idx])}, slot_dtype(idx)});
    }
  }
  // The second halves of thin ones are ready only when the first ones have their means. Plans begin
  // with the last slots, so they come last.
  for (std::size_t slot = 0; first_slot_ > 0 && slot < specs.size(); ++slot) {
    options_.plan.slot_keys.push_back(static_cast<std::int64_t>(slot) < first_slot_ ? 0 : 1);
  }
  return Layout::make(specs);
}

// The next arena's memory, where the neighbours see it if there are any.
ZeroedMemory SharedGradients::allocate_arena(std::int64_t size_bytes) const {
  const auto& neighbours = options_.exchange.neighbours;
  if (!neighbours) return allocate_zeroed(size_bytes, c10::Device(c10::kCPU));
  return {neighbours->arena(neighbours->own_place(), arenas_.size()), neighbours->own_memory()};
}

// --- backward ------------------------------------------------------------------------------------

void SharedGradients::expect_usable() {
  if (!is_deferred_) return;
  fail(ErrorKind::kBadState,
       "a backward began while the update before it waits for its sums; call "
       "engine.backward(loss) or engine.step(loss) in place of loss.backward(), or "
       "engine.settle() before it");
}

void SharedGradients::begin_round() {
  exchange_->begin(num_contributors_);
  has_buffers_ = false;
  std::fill(is_assigned_.begin(), is_assigned_.end(), std::uint8_t{0});
  is_nonfinite_.assign(parameters_.size(), 0);
  first_nonfinite_ = -1;
  num_nonfinite_ = 0;
}

void SharedGradients::ingest(std::size_t idx, at::Tensor gradient, bool overwrites) {
  const at::Tensor& view = views_[idx];
  const bool is_there = gradient.is_same(view);
  if (!is_there && (!same_layout(gradient, view) || is_lazy_view(gradient))) {
    gradient = gradient.new_empty_strided(view.sizes(), view.strides()).copy_(gradient);
  }
  const DType dtype = real_dtype(view);
  const std::int64_t num_elements = num_real_elements(view);
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
  if (is_finite || is_nonfinite_[idx] != 0) return;
  is_nonfinite_[idx] = 1;
  ++num_nonfinite_;
  if (first_nonfinite_ < 0) {
    first_nonfinite_ = static_cast<std::int64_t>(idx);
    nonfinite_microbatch_ = num_microbatches_ + 1;
  }
}

void SharedGradients::zero(std::size_t idx) {
  std::memset(views_[idx].mutable_data_ptr(), 0, views_[idx].nbytes());
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
  const std::int32_t bucket = fill_slot(slot_idx);
  if (bucket >= 0) exchange_->ready(bucket);
}

}  // namespace tradewind
