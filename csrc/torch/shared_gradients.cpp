#include "torch/shared_gradients.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "torch/hot_measure.h"
#include "torch/parallel.h"
#include "torch/parameter_checks.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

// Measures have one only where they are wanted.
enum ChannelIdx : std::int32_t { kFactsChannel, kBuffersChannel, kMeasuresChannel };

// Below, a gradient fits the caches of this core and waking others would cost more.
constexpr std::int64_t kParallelElements = 256 * 1024;

bool is_shared(const at::Tensor& parameter) { return parameter.requires_grad(); }

// A complex number travels as its two parts.
DType slot_dtype(DType dtype, bool sums) {
  if (dtype == DType::kComplex64) return DType::kFloat32;
  if (dtype == DType::kComplex128) return DType::kFloat64;
  return sums && dtype != DType::kFloat64 ? DType::kFloat32 : dtype;
}

// Memory in which the gradient of a parameter can lie: its order of elements, without gaps.
at::Tensor dense_like(const at::Tensor& parameter) {
  return is_dense(parameter) ? parameter.detach()
                             : parameter.detach().clone(at::MemoryFormat::Contiguous);
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

// What every rank says when its backward has ended. Followed by one bit for each parameter that it
// used, and rank 0's order and urgency of buckets.
struct SharedGradients::Facts {
  std::int64_t num_nonfinite;
  std::int64_t first_nonfinite;
  std::int64_t microbatch;
  std::uint8_t is_present;
  std::uint8_t has_next;
  std::uint8_t has_urgency;
  std::uint8_t padding;
  std::uint32_t num_changes;     // of parameters in place, so far
  std::uint64_t weights_digest;  // where ranks compare
};

SharedGradients::SharedGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 std::shared_ptr<Peers> peers, std::shared_ptr<Board> board,
                                 const Options& options)
    : parameters_(std::move(parameters)), names_(std::move(names)), options_(options) {
  const c10::AutoGradMode no_grad(false);
  std::vector<SlotSpec> specs;
  slot_of_.assign(parameters_.size(), -1);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!is_shared(parameter)) continue;
    const DType dtype = check_parameter(parameter, c10::Device(c10::kCPU), names_[i]);
    const std::int64_t num_elements = parameter.numel() * (is_complex(dtype) ? 2 : 1);
    slot_of_[i] = static_cast<std::int64_t>(specs.size());
    parameter_of_.push_back(i);
    specs.push_back({names_[i], {num_elements}, slot_dtype(dtype, options_.sums_microbatches)});
  }
  rank_ = peers->rank();
  layout_ = Layout::make(specs);
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
    memory.arenas.push_back(arenas_.back().data);
  }
  views_.resize(parameters_.size());
  for (std::size_t s = 0; s < parameter_of_.size(); ++s) {
    const Slot& slot = layout_.slots()[s];
    const at::Tensor& parameter = parameters_[parameter_of_[s]];
    const ZeroedMemory& arena = arenas_[static_cast<std::size_t>(slot.arena_idx)];
    const auto dtype = parameter.is_complex() ? parameter.scalar_type() : torch_dtype(slot.dtype);
    views_[parameter_of_[s]] =
        tensor_over(dense_like(parameter), dtype, arena.data + slot.offset_bytes, arena.keeper);
  }

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
  const std::int64_t facts_bytes = static_cast<std::int64_t>(
      sizeof(Facts) + (parameters_.size() + 7) / 8 + 2 * num_buckets * sizeof(std::int32_t));
  std::vector<std::vector<std::int64_t>> channels{
      std::vector<std::int64_t>(static_cast<std::size_t>(peers->size()), facts_bytes)};
  std::int64_t buffer_bytes = 0;
  for (const at::Tensor& buffer : options_.buffers) {
    buffer_bytes += static_cast<std::int64_t>(buffer.nbytes());
  }
  channels.emplace_back(static_cast<std::size_t>(peers->size()), 0)[0] = buffer_bytes;
  if (options_.measures) {
    for (const Slot& slot : layout_.slots()) {
      blocks_.emplace_back(static_cast<std::size_t>(num_norm_blocks(slot.num_elements)));
    }
    std::vector<std::int64_t>& bytes = channels.emplace_back();
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(peers->size()); ++rank) {
      std::int64_t num_blocks = 0;
      for (const PlanPiece& piece : plan_.pieces()) {
        for (const SlotRun& run : runs_between(layout_, piece.cuts[rank], piece.cuts[rank + 1])) {
          num_blocks += num_norm_blocks(run.end - run.begin);
        }
      }
      bytes.push_back(num_blocks * static_cast<std::int64_t>(sizeof(BlockMeasure)));
    }
    callbacks.on_sum = [this](std::int32_t piece_idx) { measure_piece(piece_idx); };
    callbacks.on_all_summed = [this] { publish_measures(); };
  }
  num_contributors_next_ = peers->size();
  Exchange::Memory gathered = memory;
  if (options_.shards_update) {
    gathered.place = [this](const Cut& cut) { return parameter_at(cut); };
    callbacks.on_release = [this](std::int32_t piece_idx) { update_piece(piece_idx); };
    fragments_of_.resize(plan_.pieces().size());
    for (std::size_t piece = 0; piece < plan_.pieces().size(); ++piece) {
      const auto& cuts = plan_.pieces()[piece].cuts;
      const auto rank = static_cast<std::size_t>(rank_);
      for (const SlotRun& run : runs_between(layout_, cuts[rank], cuts[rank + 1])) {
        fragments_of_[piece].push_back(fragments_.size());
        fragments_.push_back(
            {static_cast<std::int32_t>(piece),
             static_cast<std::int64_t>(parameter_of_[static_cast<std::size_t>(run.slot_idx)]),
             run.begin, run.end});
      }
    }
  }
  exchange_ = std::make_unique<Exchange>(plan_, memory, std::move(gathered), std::move(peers),
                                         std::move(board), options_.exchange, std::move(callbacks),
                                         std::move(channels));
  std::vector<at::Tensor> hooked = parameters_;
  for (at::Tensor& parameter : hooked) {
    if (!is_shared(parameter)) parameter = at::Tensor();
  }
  hooks_ = std::make_unique<GradientHooks>(
      hooked,
      [this](std::size_t idx, const at::Tensor&) { under_autograd([&] { arrive(idx); }); },
      /*takes_complex=*/true);
  hooks_->install();
}

SharedGradients::~SharedGradients() = default;

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
  is_finished_ = has_facts_ = false;
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
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_of_[idx])];
  const bool overwrites = !options_.sums_microbatches || is_taken_[idx] == 0;
  const auto from_dtype = slot_dtype(*arena_dtype(gradient.scalar_type()), false);
  auto* to = static_cast<std::byte*>(view.mutable_data_ptr());
  bool is_finite = true;
  if (!overwrites && slot.dtype != DType::kFloat32) {
    view.add_(gradient);
    is_finite = copy_in(to, slot.dtype, to, slot.dtype, slot.num_elements, true, kSerial);
  } else {
    is_finite = copy_in(static_cast<const std::byte*>(gradient.const_data_ptr()), from_dtype, to,
                        slot.dtype, slot.num_elements, overwrites,
                        slot.num_elements >= kParallelElements ? kTorchParallel : kSerial);
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
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_of_[idx])];
  std::memset(views_[idx].mutable_data_ptr(), 0, static_cast<std::size_t>(slot.size_bytes()));
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
  const std::int32_t bucket = plan_.bucket_of(slot_of_[idx]);
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

// --- what ranks say of a round -------------------------------------------------------------------

std::vector<std::int32_t> SharedGradients::next_order() const {
  std::vector<std::int32_t> order = arrivals_;
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
  Facts facts{};
  facts.num_nonfinite = num_nonfinite_;
  facts.first_nonfinite = first_nonfinite_;
  facts.microbatch = nonfinite_microbatch_;
  facts.is_present = is_present ? 1 : 0;
  facts.has_next = has_next ? 1 : 0;
  facts.has_urgency = forward_rank_.empty() ? 0 : 1;
  if (options_.settles_itself) facts.num_changes = num_changes();
  if (compares_weights_) facts.weights_digest = weights_digest();
  const std::size_t bitmap_bytes = (parameters_.size() + 7) / 8;
  const std::size_t order_bytes = plan_.buckets().size() * sizeof(std::int32_t);
  std::vector<std::byte> bytes(sizeof(Facts) + bitmap_bytes + 2 * order_bytes);
  std::memcpy(bytes.data(), &facts, sizeof(Facts));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_used_[i] != 0) bytes[sizeof(Facts) + i / 8] |= std::byte{1} << (i % 8);
  }
  const std::vector<std::int32_t> order = next_order();
  std::byte* there = bytes.data() + sizeof(Facts) + bitmap_bytes;
  std::memcpy(there, order.data(), order_bytes);
  if (!forward_rank_.empty()) std::memcpy(there + order_bytes, forward_rank_.data(), order_bytes);
  exchange_->publish(kFactsChannel, bytes);
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
  const int size = plan_.world_size();
  const std::size_t bitmap_bytes = (parameters_.size() + 7) / 8;
  const std::size_t num_buckets = plan_.buckets().size();
  all_nonfinite_.clear();
  is_used_anywhere_.assign(parameters_.size(), 0);
  num_contributors_next_ = num_present_ = 0;
  first_present_ = -1;
  for (int rank = 0; rank < size; ++rank) {
    const auto bytes = exchange_->published(kFactsChannel, rank);
    Facts facts{};
    std::memcpy(&facts, bytes.data(), sizeof(Facts));
    if (options_.settles_itself) check_weights(rank, facts);
    num_contributors_next_ += facts.has_next;
    num_present_ += facts.is_present;
    if (facts.num_nonfinite > 0) {
      all_nonfinite_.push_back({rank, names_[static_cast<std::size_t>(facts.first_nonfinite)],
                                facts.microbatch, facts.num_nonfinite});
    }
    const std::byte* bitmap = bytes.data() + sizeof(Facts);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const bool is_used = (bitmap[i / 8] & (std::byte{1} << (i % 8))) != std::byte{0};
      if (is_used) is_used_anywhere_[i] = 1;
    }
    if (rank != 0) continue;
    std::vector<std::int32_t> order(num_buckets), urgency(num_buckets);
    std::memcpy(order.data(), bitmap + bitmap_bytes, num_buckets * sizeof(std::int32_t));
    std::memcpy(urgency.data(), bitmap + bitmap_bytes + num_buckets * sizeof(std::int32_t),
                num_buckets * sizeof(std::int32_t));
    if (facts.has_urgency == 0) urgency.clear();
    exchange_->set_order(std::move(order), std::move(urgency));
  }
  has_facts_ = true;
  compares_weights_ = std::exchange(compares_next_, false);
}

// With an optimizer that is not ours, a rank that skipped a backward, or ran another one, has other
// weights from then on. Parameters that changed more often on one rank than on another (which is no
// error by itself: averages may be swapped in on one rank) have weights compared in the next round.
void SharedGradients::check_weights(int rank, const Facts& facts) {
  if (facts.is_present == 0) return;  // has no data left, and takes no part in updates
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
    found.push_back(static_cast<std::int64_t>(parameter_of_[static_cast<std::size_t>(slot)]));
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

// Ranks that ran out of data unannounced were counted in.
void SharedGradients::correct_mean() {
  if (options_.shards_update) return;
  const std::int64_t wanted = divides_by_all_ ? plan_.world_size() : num_present_;
  if (wanted == num_contributors_ || wanted == 0) return;
  const c10::AutoGradMode no_grad(false);
  const double factor = static_cast<double>(num_contributors_) / static_cast<double>(wanted);
  for (const std::size_t idx : parameter_of_) views_[idx].mul_(factor);
}

void SharedGradients::settle() {
  if (!is_begun_) return;
  if (!is_finished_) {
    fail(ErrorKind::kBadState,
         "settle: expected finish_backward() before it, so that every bucket is sent");
  }
  read_facts();
  exchange_->wait_all();
  correct_mean();
  for (const std::size_t idx : parameter_of_) assign(idx);
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  num_microbatches_ = 0;
  is_begun_ = false;
  if (options_.shards_update) {
    shard_table_->drop_parts();
    if (!update_error_.empty()) fail(ErrorKind::kBadState, update_error_);
  }
}

// --- updates of shards --------------------------------------------------------------------------

std::byte* SharedGradients::parameter_at(const Cut& cut) const {
  const at::Tensor& parameter = parameters_[parameter_of_[static_cast<std::size_t>(cut.slot_idx)]];
  const std::size_t bytes = parameter.element_size() / (parameter.is_complex() ? 2 : 1);
  return static_cast<std::byte*>(parameter.mutable_data_ptr()) +
         static_cast<std::size_t>(cut.element) * bytes;
}

void SharedGradients::set_shards(OptimizerTable& table,
                                 std::vector<std::size_t> table_idx_of_fragment) {
  shard_table_ = &table;
  table.set_parallel(kSerial);
  table_idx_of_fragment_ = std::move(table_idx_of_fragment);
}

void SharedGradients::release(std::vector<GroupOptions> groups, double gradient_multiplier,
                              bool is_vetoed) {
  read_facts();
  if (shard_table_ == nullptr) {
    fail(ErrorKind::kBadState, "release: expected set_shards() before it");
  }
  release_groups_ = std::move(groups);
  // As correct_mean() has it.
  release_multiplier_ = gradient_multiplier * static_cast<double>(num_contributors_) /
                        static_cast<double>(std::max<std::int64_t>(num_present_, 1));
  is_vetoed_ = is_vetoed;
  update_error_.clear();
  exchange_->release();
}

// On a thread of the exchange.
void SharedGradients::update_piece(std::int32_t piece_idx) {
  if (is_vetoed_) return;
  std::vector<std::size_t> found;
  for (const std::size_t fragment : fragments_of_[static_cast<std::size_t>(piece_idx)]) {
    const auto parameter = static_cast<std::size_t>(fragments_[fragment].parameter_idx);
    if (is_used_anywhere_[parameter] != 0) found.push_back(table_idx_of_fragment_[fragment]);
  }
  try {
    std::sort(found.begin(), found.end());
    shard_table_->sweep_part(found, release_groups_, release_multiplier_, false);
  } catch (const std::exception& error) {
    update_error_ = error.what();
  }
}

// --- measures of the means -----------------------------------------------------------------------

void SharedGradients::measure_piece(std::int32_t piece_idx) {
  const PlanPiece& piece = plan_.pieces()[static_cast<std::size_t>(piece_idx)];
  const auto rank = static_cast<std::size_t>(rank_);
  for (const SlotRun& run : runs_between(layout_, piece.cuts[rank], piece.cuts[rank + 1])) {
    const auto s = static_cast<std::size_t>(run.slot_idx);
    const Slot& slot = layout_.slots()[s];
    const std::byte* values = arenas_[static_cast<std::size_t>(slot.arena_idx)].data +
                              slot.offset_bytes + run.begin * element_bytes(slot.dtype);
    kernels().measure[static_cast<int>(slot.dtype)](
        values, run.end - run.begin, blocks_[s].data() + run.begin / kNormBlockElements);
  }
}

void SharedGradients::publish_measures() {
  own_measures_.clear();
  const auto rank = static_cast<std::size_t>(rank_);
  for (const PlanPiece& piece : plan_.pieces()) {
    for (const SlotRun& run : runs_between(layout_, piece.cuts[rank], piece.cuts[rank + 1])) {
      const BlockMeasure* first =
          blocks_[static_cast<std::size_t>(run.slot_idx)].data() + run.begin / kNormBlockElements;
      const auto* bytes = reinterpret_cast<const std::byte*>(first);
      own_measures_.insert(own_measures_.end(), bytes,
                           bytes + num_norm_blocks(run.end - run.begin) *
                                       static_cast<std::int64_t>(sizeof(BlockMeasure)));
    }
  }
  exchange_->publish(kMeasuresChannel, own_measures_);
}

void SharedGradients::take_measures() {
  exchange_->wait_summed();  // this rank's own blocks
  for (int peer = 0; peer < plan_.world_size(); ++peer) {
    const std::byte* bytes = exchange_->published(kMeasuresChannel, peer).data();
    if (peer == rank_) continue;
    const auto rank = static_cast<std::size_t>(peer);
    for (const PlanPiece& piece : plan_.pieces()) {
      for (const SlotRun& run : runs_between(layout_, piece.cuts[rank], piece.cuts[rank + 1])) {
        const auto num_bytes =
            static_cast<std::size_t>(num_norm_blocks(run.end - run.begin)) * sizeof(BlockMeasure);
        std::memcpy(
            blocks_[static_cast<std::size_t>(run.slot_idx)].data() + run.begin / kNormBlockElements,
            bytes, num_bytes);
        bytes += num_bytes;
      }
    }
  }
}

void SharedGradients::give_measures(HotMeasure& hot, const std::vector<std::int64_t>& hot_idx_of) {
  take_measures();
  for (const std::size_t idx : parameter_of_) {
    const std::int64_t hot_idx = hot_idx_of[idx];
    const at::Tensor gradient = options_.sums_microbatches || options_.shards_update
                                    ? views_[idx]
                                    : parameters_[idx].grad();
    if (hot_idx < 0 || !gradient.is_same(views_[idx])) continue;
    const auto& blocks = blocks_[static_cast<std::size_t>(slot_of_[idx])];
    hot.measure_with(static_cast<std::size_t>(hot_idx), gradient, [&](std::span<BlockMeasure> to) {
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
