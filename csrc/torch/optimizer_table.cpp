#include "torch/optimizer_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "torch/backward_update.h"
#include "torch/parallel.h"

namespace tradewind {

namespace {

// A hook costs about a microsecond, as long as it takes to read so many elements at the step.
constexpr std::int64_t kHookedElements = 16 * 1024;
// So many small parameters are measured in backward all the same: what they cost is not noticed,
// and whoever looks finds every gradient measured hot.
constexpr std::int64_t kHookedSmallOnes = 256;

// The parameters, undefined where a hook would cost more than the read that it saves.
std::vector<at::Tensor> worth_measuring_hot(const std::vector<at::Tensor>& parameters) {
  const auto is_small = [](const at::Tensor& p) { return p.numel() < kHookedElements; };
  std::vector<at::Tensor> chosen = parameters;
  if (std::count_if(chosen.begin(), chosen.end(), is_small) > kHookedSmallOnes) {
    std::replace_if(chosen.begin(), chosen.end(), is_small, at::Tensor());
  }
  return chosen;
}

}  // namespace

OptimizerTable::OptimizerTable(const StorageOptions& storage)
    : parameters_(storage, c10::Device(c10::DeviceType::CPU)), parallel_(kTorchParallel) {}
OptimizerTable::~OptimizerTable() = default;

void OptimizerTable::add_group(std::string_view rule_name,
                               const std::vector<at::Tensor>& parameters,
                               const std::vector<std::string>& names) {
  parameters_.add_group(rule_name, parameters, names);
  if (hooks_) hook_gradients(on_gradient_);
}

std::int64_t OptimizerTable::collect() {
  sum_gradients();
  const std::int64_t num_collected = parameters_.collect();
  bind_slots();
  return num_collected;
}

std::int64_t OptimizerTable::collect_some(std::span<const std::size_t> parameter_idx) {
  const std::int64_t num_collected = parameters_.collect_some(parameter_idx);
  bind_slots();
  return num_collected;
}

void OptimizerTable::bind_slots() {
  slots_.clear();
  has_measure_ = false;
  for (const OptimizerParameters::Collected& collected : parameters_.collected()) {
    const OptimizerParameters::Entry& entry = parameters_.entry(collected.idx);
    SweepSlot slot;
    slot.dtype = entry.real_dtype();
    slot.gradient_dtype = collected.gradient_dtype(entry);
    slot.parameter = collected.target.mutable_data_ptr();
    slot.gradient = collected.gradient.const_data_ptr();
    slot.num_elements = collected.num_elements();
    slot.rule_idx = parameters_.group_of(entry).rule_idx;
    slots_.push_back(slot);
  }
}

const Measure& OptimizerTable::measure() {
  measure_.begin(slots_);
  num_hot_ = 0;
  for (std::size_t i = 0; i < slots_.size() && hot_measure_; ++i) {
    const OptimizerParameters::Collected& collected = parameters_.collected()[i];
    const auto blocks = hot_measure_->blocks_for(collected.idx, collected.gradient);
    if (blocks.empty()) continue;
    measure_.adopt(static_cast<std::int64_t>(i), blocks);
    ++num_hot_;
  }
  measure_.run(kernels(), parallel_);
  has_measure_ = true;
  return measure_;
}

MeasureResult OptimizerTable::measure_result() const {
  return {measure_.norm(), measure_.num_nonfinite(), first_nonfinite_name(), num_hot_};
}

std::string OptimizerTable::first_nonfinite_name() const {
  const std::int64_t slot = measure_.first_nonfinite_slot();
  if (slot < 0) return "";
  return parameters_.entry(parameters_.collected()[static_cast<std::size_t>(slot)].idx).name;
}

// Also binds the states: both are new at every step.
void OptimizerTable::make_scalars(const std::vector<GroupOptions>& groups) {
  scalars_.clear();
  struct Key {
    std::size_t group_idx;
    std::int64_t step;
    bool is_first, is_double;
    bool operator==(const Key&) const = default;
  };
  Key last{parameters_.size() + 1, 0, false, false};
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const std::size_t idx = parameters_.collected()[i].idx;
    const OptimizerParameters::Entry& entry = parameters_.entry(idx);
    const OptimizerParameters::Group& group = parameters_.group_of(entry);
    const float* counter = group.state.step(entry.slot_idx);
    const std::int64_t step = counter == nullptr ? 1 : std::llround(*counter) + 1;
    const Key key{entry.group_idx, step, entry.is_first, slots_[i].dtype == DType::kFloat64};
    const GroupOptions& options = groups[entry.group_idx];
    if (scalars_.empty() || !(key == last)) {
      const auto fill = key.is_double ? group.rule().scalars_double : group.rule().scalars_float;
      fill(options.values.data(), step, entry.is_first, &scalars_.emplace_back());
      last = key;
    }
    slots_[i].scalars_idx = static_cast<std::int64_t>(scalars_.size()) - 1;
    slots_[i].sign = options.maximize ? -1.0 : 1.0;
    slots_[i].random_key =
        random_key(parameters_.storage().seed, step, static_cast<std::int64_t>(idx));
    if (group.rule().needs == Needs::kMatrix) {
      slots_[i].matrix_scale = matrix_lr_factor(entry.sizes, options.matrix.adjust_lr);
    }
    group.state.bind(entry.slot_idx, slots_[i]);
  }
}

void OptimizerTable::sweep(const std::vector<GroupOptions>& groups, double gradient_multiplier,
                           bool wants_changes) {
  parameters_.check_options(groups);
  parameters_.refresh_masters();
  make_scalars(groups);
  const MatrixTransform transform = [&](std::int64_t slot_idx, void* direction) {
    const auto& collected = parameters_.collected()[static_cast<std::size_t>(slot_idx)];
    const OptimizerParameters::Entry& entry = parameters_.entry(collected.idx);
    // The gradient lies in the order of the arrays that the sweep walks over.
    orthogonalize(collected.gradient, entry.dtype == DType::kFloat64, direction,
                  groups[entry.group_idx].matrix);
  };
  sweep_.run(slots_, scalars_, {gradient_multiplier, wants_changes, &transform}, kernels(),
             parallel_);
  take_statistics(wants_changes);
  for (const OptimizerParameters::Collected& collected : parameters_.collected()) {
    OptimizerParameters::Entry& entry = parameters_.entry(collected.idx);
    float* const counter = parameters_.group_of(entry).state.step(entry.slot_idx);
    if (counter != nullptr) *counter += 1.0F;
    entry.is_first = false;
  }
  parameters_.finish_update();
  slots_.clear();
}

void OptimizerTable::sweep_part(std::span<const std::size_t> parameter_idx,
                                const std::vector<GroupOptions>& groups, double gradient_multiplier,
                                bool wants_changes) {
  if (collect_some(parameter_idx) == OptimizerParameters::kNoLongerFits) {
    fail(ErrorKind::kBadState, "a parameter's shape or strides changed before its update");
  }
  sweep(groups, gradient_multiplier, wants_changes);
  parts_.insert(parts_.end(), statistics_.begin(), statistics_.end());
}

MeasureResult OptimizerTable::end_parts() {
  (void)collect();
  (void)measure();
  MeasureResult measured = measure_result();
  skip();
  std::vector<SlotChange> changes(parameters_.size());
  for (const ParameterStatistics& part : std::exchange(parts_, {})) {
    changes[static_cast<std::size_t>(part.parameter_idx)] = part.change;
  }
  for (ParameterStatistics& whole : statistics_) {
    whole.change = changes[static_cast<std::size_t>(whole.parameter_idx)];
  }
  return measured;
}

void OptimizerTable::skip() {
  take_statistics(false);
  slots_.clear();
  parameters_.forget();
}

void OptimizerTable::take_statistics(bool has_changes) {
  statistics_.clear();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    statistics_.push_back({static_cast<std::int64_t>(parameters_.collected()[i].idx),
                           slots_[i].num_elements,
                           has_measure_ ? measure_.slots()[i] : SlotMeasure{},
                           has_changes ? sweep_.changes()[i] : SlotChange{}});
  }
  has_measure_ = false;
}

void OptimizerTable::release_gradients() {
  slots_.clear();
  if (gradient_arena_) gradient_arena_->clear();
  parameters_.release_gradients();
}

void OptimizerTable::hook_gradients(OnGradient action) {
  hooks_.reset();
  on_gradient_ = action;
  const std::vector<at::Tensor>& tensors = parameters_.tensors();
  hot_measure_ = std::make_unique<HotMeasure>(tensors.size());
  gradient_arena_ = action == OnGradient::kSum ? std::make_unique<GradientArena>(tensors) : nullptr;
  parameters_.take_sums(gradient_arena_.get());
  backward_update_ =
      action == OnGradient::kUpdate ? std::make_unique<BackwardUpdate>(*this) : nullptr;
  std::vector<at::Tensor> hooked = tensors;
  if (action == OnGradient::kMeasure) hooked = worth_measuring_hot(tensors);
  if (action == OnGradient::kShared) hooked.assign(tensors.size(), at::Tensor());
  hooks_ =
      std::make_unique<GradientHooks>(hooked, [this](std::size_t idx, const at::Tensor& parameter) {
        if (backward_update_) {
          backward_update_->arrive(idx);
        } else {
          take_hot(idx, parameter);
        }
      });
  hooks_->install();
}

HotMeasure& OptimizerTable::hot_measure() const {
  if (!hot_measure_) {
    fail(ErrorKind::kBadState, "measures: expected hook_gradients('shared') before them");
  }
  return *hot_measure_;
}

void OptimizerTable::take_hot(std::size_t idx, const at::Tensor& parameter) {
  if (gradient_arena_ && gradient_arena_->holds(idx)) {
    gradient_arena_->ingest(idx, parameter, *hot_measure_, measures_hot_);
  } else if (measures_hot_) {
    hot_measure_->take(idx, parameter);
  }
}

void OptimizerTable::install_hooks() {
  if (hooks_) hooks_->install();
}

void OptimizerTable::remove_hooks() noexcept {
  if (hooks_) hooks_->remove();
}

void OptimizerTable::sum_gradients() {
  for (std::size_t idx = 0; gradient_arena_ && idx < parameters_.size(); ++idx) {
    if (gradient_arena_->holds(idx)) {
      gradient_arena_->ingest(idx, parameters_.tensors()[idx], *hot_measure_, false);
    }
  }
}

}  // namespace tradewind
