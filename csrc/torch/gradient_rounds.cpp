#include "torch/gradient_rounds.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <numeric>
#include <utility>

#include "share/codec.h"
#include "torch/parameter_checks.h"
#include "torch/slot_tensor.h"

namespace tradewind {

GradientRounds::GradientRounds(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                               c10::Device device, int rank, int size, const Options& options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      device_(device),
      rank_(rank),
      size_(size),
      sums_microbatches_(options.sums_microbatches),
      slot_of_(parameters_.size(), -1),
      views_(parameters_.size()),
      is_used_(parameters_.size()),
      is_taken_(parameters_.size()),
      kept_(parameters_.size()),
      num_contributors_next_(size),
      settles_itself_(options.settles_itself),
      throw_through_autograd_(options.throw_through_autograd),
      num_arrived_(parameters_.size()),
      num_expected_(parameters_.size()) {}

GradientRounds::~GradientRounds() = default;

// --- construction --------------------------------------------------------------------------------

void GradientRounds::check_shareable(std::size_t idx, std::string_view codec) const {
  const DType dtype = check_parameter(parameters_[idx], device_, names_[idx]);
  // What one lossy codec takes, all do.
  const bool is_lossy = codec != name_of(Codec::kNone);
  if (!is_lossy || takes(Codec::kBfloat16, real_dtype(parameters_[idx]))) return;
  fail(ErrorKind::kBadType, "codec '", codec,
       "': expected gradients of float32, bfloat16 or float16, got ", dtype_name(dtype),
       " of parameter '", names_[idx], "'; use codec='none'");
}

DType GradientRounds::slot_dtype(std::size_t idx) const {
  const DType dtype = real_dtype(parameters_[idx]);
  return sums_microbatches_ && dtype != DType::kFloat64 ? DType::kFloat32 : dtype;
}

void GradientRounds::make_plan(Layout layout, const PlanOptions& options) {
  layout_ = std::move(layout);
  plan_ = Plan::make(layout_, size_, options);
  num_missing_.resize(plan_.buckets().size());
}

void GradientRounds::make_view(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_of_[idx])];
  const ZeroedMemory& arena = arenas_[static_cast<std::size_t>(slot.arena_idx)];
  const auto dtype = parameter.is_complex() ? parameter.scalar_type() : torch_dtype(slot.dtype);
  views_[idx] =
      tensor_over(dense_like(parameter), dtype, arena.data + slot.offset_bytes, arena.keeper);
}

void GradientRounds::make_hooks() {
  if (settles_itself_) {
    std::vector<at::Tensor> shared;
    for (const std::size_t idx : parameter_of_) shared.push_back(parameters_[idx]);
    weights_.emplace(std::move(shared), size_);
  }
  std::vector<at::Tensor> hooked(parameters_.size());
  for (const std::size_t idx : parameter_of_) hooked[idx] = parameters_[idx];
  hooks_ = std::make_unique<GradientHooks>(
      hooked, [this](std::size_t idx, const at::Tensor&) { under_autograd([&] { arrive(idx); }); },
      /*takes_complex=*/true);
  hooks_->install();
}

std::int64_t GradientRounds::memory_bytes() const {
  const auto& arenas = layout_.arenas();
  return std::accumulate(
      arenas.begin(), arenas.end(), std::int64_t{0},
      [](std::int64_t total, const ArenaSpec& arena) { return total + arena.size_bytes; });
}

// --- backward ------------------------------------------------------------------------------------

template <class Body>
void GradientRounds::under_autograd(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (throw_through_autograd_) throw_through_autograd_(error);
    throw;
  }
}

void GradientRounds::arrive(std::size_t idx) {
  const std::scoped_lock lock(mutex_);
  expect_usable();
  if (settles_itself_) open_backward(is_syncing_);
  // Hooks run for a gradient that is undefined, too: it counts as one that did not arrive.
  if (parameters_[idx].grad().defined()) is_used_[idx] = 1;
  if (sums_microbatches_) {
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
  if (!sums_microbatches_) take_in(idx);
  count_in(idx);
}

void GradientRounds::open_backward(bool syncs) {
  if (is_backward_open_ || !hooks_->may_run()) return;
  is_backward_open_ = true;
  is_syncing_ = syncs;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { under_autograd([&] { close_backward(); }); });
}

void GradientRounds::close_backward() {
  is_backward_open_ = false;
  if (!is_syncing_) {
    end_microbatch();
    return;
  }
  finish_backward();
  settle();
}

void GradientRounds::begin() {
  if (is_begun_) return;
  if (has_published_) read_facts();
  num_contributors_ = num_contributors_next_ > 0 ? num_contributors_next_ : size_;
  begin_round();
  is_begun_ = true;
  is_finished_ = has_facts_ = is_shadow_ = false;
  std::fill(num_arrived_.begin(), num_arrived_.end(), 0);
  std::fill(is_taken_.begin(), is_taken_.end(), std::uint8_t{0});
  arrivals_.clear();
  slot_arrivals_.clear();
  for (std::size_t bucket = 0; bucket < num_missing_.size(); ++bucket) {
    num_missing_[bucket] = static_cast<std::int64_t>(plan_.buckets()[bucket].slots.size());
  }
}

void GradientRounds::take_in(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& parameter = parameters_[idx];
  const at::Tensor gradient = parameter.grad();
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
  ingest(idx, gradient, !sums_microbatches_ || is_taken_[idx] == 0);
  is_taken_[idx] = 1;
  if (sums_microbatches_) {
    parameter.mutable_grad().reset();
  } else if (!gradient.is_same(views_[idx])) {
    parameter.mutable_grad() = views_[idx];
  }
}

// A parameter that this backward did not reach.
void GradientRounds::fill_missing(std::size_t idx) {
  const at::Tensor gradient = parameters_[idx].grad();
  if (sums_microbatches_) {
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

std::int32_t GradientRounds::fill_slot(std::int64_t slot_idx) {
  const std::int32_t bucket = plan_.bucket_of(slot_idx);
  if (bucket < 0 || --num_missing_[static_cast<std::size_t>(bucket)] > 0) return -1;
  arrivals_.push_back(bucket);
  return bucket;
}

void GradientRounds::finish_backward(bool has_next) {
  const std::scoped_lock lock(mutex_);
  const c10::DeviceGuard guard(device_);
  begin();
  if (is_finished_) return;
  std::vector<std::uint8_t> is_counted(parameters_.size());
  if (!knows_expected_) {
    for (const std::size_t idx : slot_arrivals_) {
      if (!sums_microbatches_) take_in(idx);
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

void GradientRounds::shadow_round(bool has_next) {
  const std::scoped_lock lock(mutex_);
  const c10::DeviceGuard guard(device_);
  begin();
  is_shadow_ = true;
  for (const std::size_t idx : parameter_of_) {
    zero(idx);
    if (!sums_microbatches_ && parameters_[idx].grad().is_same(views_[idx])) {
      parameters_[idx].mutable_grad().reset();
    }
  }
  for (auto idx = parameter_of_.rbegin(); idx != parameter_of_.rend(); ++idx) count_in(*idx);
  is_finished_ = true;
  publish_facts(has_next, false);
}

void GradientRounds::abandon(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  num_microbatches_ = 0;
  is_backward_open_ = false;
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  if (is_begun_) fail_with(reason);
  is_begun_ = false;
}

// --- what ranks say of a round -------------------------------------------------------------------

void GradientRounds::publish_facts(bool has_next, bool is_present) {
  RoundFacts facts;
  facts.is_present = is_present;
  facts.has_next = has_next;
  facts.wishes = own_wishes_;
  if (weights_) weights_->say(facts);
  facts.is_used = is_used_;
  publish(std::move(facts));
  has_published_ = true;
}

void GradientRounds::read_facts() {
  if (has_facts_) return;
  await_facts();
  is_used_anywhere_.assign(parameters_.size(), 0);
  num_contributors_next_ = num_present_ = 0;
  wishes_ = 0;
  if (weights_) weights_->begin();
  for (int rank = 0; rank < size_; ++rank) {
    RoundFacts facts = facts_of(rank);
    const std::string complaint = weights_ ? weights_->hear(rank, facts) : "";
    if (!complaint.empty()) {
      fail_with(complaint);
      fail(ErrorKind::kPeerLost, complaint);
    }
    num_contributors_next_ += facts.has_next ? 1 : 0;
    num_present_ += facts.is_present ? 1 : 0;
    wishes_ |= facts.wishes;
    for (std::size_t i = 0; i < parameters_.size(); ++i) is_used_anywhere_[i] |= facts.is_used[i];
    take_facts(rank, facts);
  }
  has_facts_ = true;
  if (weights_) weights_->end();
}

std::int64_t GradientRounds::num_contributors_next() {
  read_facts();
  return num_contributors_next_;
}

std::uint8_t GradientRounds::wishes() {
  // Of a round that has only begun nothing is published yet, and nobody may be waited for.
  if (has_published_ && is_finished_) read_facts();
  return wishes_;
}

// --- the end of a round --------------------------------------------------------------------------

std::int32_t GradientRounds::bucket_of(std::size_t idx) const {
  return slot_of_[idx] < 0 ? -1 : plan_.bucket_of(slot_of_[idx]);
}

std::vector<std::int64_t> GradientRounds::parameters_of(std::int32_t bucket_idx) const {
  std::vector<std::int64_t> found;
  for (const std::int64_t slot : plan_.buckets()[static_cast<std::size_t>(bucket_idx)].slots) {
    if (slot >= first_slot_) found.push_back(static_cast<std::int64_t>(parameter_at(slot)));
  }
  return found;
}

void GradientRounds::scale(double factor) {
  const c10::AutoGradMode no_grad(false);
  for (const std::size_t idx : parameter_of_) {
    const at::Tensor gradient = parameters_[idx].grad();
    if (sums_microbatches_ && is_taken_[idx] != 0) views_[idx].mul_(factor);
    if (!sums_microbatches_ && gradient.defined()) gradient.mul_(factor);
  }
}

void GradientRounds::assign(std::size_t idx) {
  const at::Tensor kept = std::exchange(kept_[idx], at::Tensor());
  views_[idx].unsafeGetTensorImpl()->bump_version();
  if (views_[idx].scalar_type() != parameters_[idx].scalar_type()) return;
  if (is_used_anywhere_[idx] != 0) {
    parameters_[idx].mutable_grad() = views_[idx];
  } else if (kept.defined()) {
    parameters_[idx].mutable_grad() = kept;
  }
}

double GradientRounds::mean_factor() const {
  const std::int64_t wanted = divides_by_all_ ? size_ : num_present_;
  if (wanted == 0) return 1.0;
  return static_cast<double>(num_contributors_) / static_cast<double>(wanted);
}

void GradientRounds::settle() {
  if (!is_begun_) return;
  if (!is_finished_) {
    fail(ErrorKind::kBadState,
         "settle: expected finish_backward() before it, so that every bucket is sent");
  }
  read_facts();
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device_);
  settle_round();
  for (const std::size_t idx : parameter_of_) assign(idx);
  std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{0});
  num_microbatches_ = 0;
  is_begun_ = false;
  end_round();
}

}  // namespace tradewind
