#include "torch/device_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "step/blocks.h"
#include "step/format.h"
#include "step/rule.h"
#include "torch/device_backward_update.h"
#include "torch/parameter_checks.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

static_assert(TRADEWIND_CUDA_BLOCK_ELEMENTS == kNormBlockElements);
static_assert(TRADEWIND_CUDA_MAX_STATES == kMaxStates);
static_assert(TRADEWIND_CUDA_MAX_OPTIONS == kMaxOptions);
static_assert(TRADEWIND_CUDA_SCALAR_BYTES == sizeof(ScalarBlock));

constexpr std::int64_t kDirectionAlignment = 256;

// A scalar that kernels read where it lies.
const void* scalar_data(const at::Tensor& scalar, c10::Device device, const char* name,
                        bool may_be_double) {
  const bool is_right_dtype =
      scalar.scalar_type() == at::kFloat || (may_be_double && scalar.scalar_type() == at::kDouble);
  if (scalar.device() != device || scalar.numel() != 1 || !is_right_dtype) {
    fail(ErrorKind::kBadValue, name, ": expected one float32", may_be_double ? " or float64" : "",
         " on ", device.str(), ", got ", dtype_text(scalar.scalar_type()), " ", shape_text(scalar),
         " on ", scalar.device().str());
  }
  return scalar.const_data_ptr();
}

std::int64_t direction_bytes(std::int64_t num_elements, bool is_double) {
  const std::int64_t bytes = num_elements * (is_double ? 8 : 4);
  return (bytes + kDirectionAlignment - 1) / kDirectionAlignment * kDirectionAlignment;
}

}  // namespace

DeviceTable::DeviceTable(std::shared_ptr<const CudaLibrary> library, c10::Device device,
                         const StorageOptions& storage, std::int64_t max_direction_bytes)
    : library_(std::move(library)),
      parameters_(storage, device),
      max_direction_bytes_(max_direction_bytes),
      readings_(device) {}

DeviceTable::~DeviceTable() = default;

void DeviceTable::add_group(std::string_view rule_name, const std::vector<at::Tensor>& parameters,
                            const std::vector<std::string>& names,
                            const std::vector<std::int64_t>& numbers) {
  const c10::DeviceGuard guard(parameters_.device());
  parameters_.add_group(rule_name, parameters, names);
  numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
}

DeviceImage& DeviceTable::image() {
  if (image_) return *image_;
  DeviceImage::Size size;
  size.num_slots = static_cast<std::int64_t>(parameters_.size());
  size.num_groups = static_cast<std::int64_t>(parameters_.num_groups());
  for (const at::Tensor& parameter : parameters_.tensors()) {
    size.num_blocks += num_norm_blocks(parameter.numel() * (parameter.is_complex() ? 2 : 1));
  }
  const c10::DeviceGuard guard(parameters_.device());
  image_ = std::make_unique<DeviceImage>(size, parameters_.device());
  has_stepped_ = at::zeros({size.num_slots},
                           at::TensorOptions().dtype(at::kByte).device(parameters_.device()));
  return *image_;
}

std::vector<NamedTensor> DeviceTable::add_state(std::int64_t parameter_idx, bool is_first) {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(parameters_.device());
  image();
  if (!is_first) has_stepped_.select(0, parameter_idx).fill_(1);
  return parameters_.add_state(parameter_idx, is_first);
}

void DeviceTable::prepare(std::vector<GroupOptions> groups,
                          const std::vector<at::Tensor>& learning_rates,
                          const DeviceOrders& orders) {
  parameters_.check_options(groups);
  const c10::DeviceGuard guard(parameters_.device());
  groups_ = std::move(groups);
  orders_ = orders;
  image();
  fill_groups(groups_, learning_rates);
  fill_slots(groups_);
  plan_passes();
  fill_lists();
  place_directions();
  fill_settings(orders);
  image().upload(orders.is_capturing);
}

void DeviceTable::fill_groups(const std::vector<GroupOptions>& groups,
                              const std::vector<at::Tensor>& learning_rates) {
  if (learning_rates.size() != groups.size()) {
    fail(ErrorKind::kBadValue, "prepare: expected a learning rate or none for ", groups.size(),
         " groups, got ", learning_rates.size());
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    TradewindCudaGroup& out = image().groups()[g];
    out = {};
    std::copy(groups[g].values.begin(), groups[g].values.end(), out.options);
    const at::Tensor& lr = learning_rates[g];
    if (!lr.defined()) continue;
    out.lr = scalar_data(lr, parameters_.device(), "lr", true);
    out.lr_is_double = lr.scalar_type() == at::kDouble ? 1 : 0;
  }
}

void DeviceTable::fill_slots(const std::vector<GroupOptions>& groups) {
  const auto& collected = parameters_.collected();
  std::int64_t num_blocks = 0;
  for (std::size_t i = 0; i < collected.size(); ++i) {
    TradewindCudaSlot& slot = image().slots()[i];
    fill_slot(i, groups[parameters_.entry(collected[i].idx).group_idx], slot);
    slot.first_block = num_blocks;
    image().first_blocks()[i] = num_blocks;
    num_blocks += num_norm_blocks(slot.num_elements);
  }
  image().first_blocks()[collected.size()] = num_blocks;
}

void DeviceTable::fill_slot(std::size_t i, const GroupOptions& options, TradewindCudaSlot& slot) {
  const OptimizerParameters::Collected& collected = parameters_.collected()[i];
  const OptimizerParameters::Entry& entry = parameters_.entry(collected.idx);
  const OptimizerParameters::Group& group = parameters_.group_of(entry);
  const RuleInfo& rule = group.rule();
  SweepSlot bound;
  group.state.bind(entry.slot_idx, bound);
  slot = {};
  slot.parameter = collected.target.mutable_data_ptr();
  slot.gradient = const_cast<void*>(collected.gradient.const_data_ptr());
  slot.master = bound.master_data;
  for (std::size_t s = 0; s < rule.state_names.size(); ++s) {
    slot.states[s] = bound.states[s];
    slot.exponents[s] = bound.exponents[s];
    slot.state_formats[s] = static_cast<std::uint8_t>(bound.state_formats[s]);
  }
  slot.step = group.state.step(entry.slot_idx);
  if (!rule.counts_steps && !rule.state_names.empty()) {
    slot.has_stepped = static_cast<std::uint8_t*>(has_stepped_.mutable_data_ptr()) + collected.idx;
  }
  slot.num_elements = collected.num_elements();
  slot.parameter_idx = numbers_[collected.idx];
  slot.sign = options.maximize ? -1.0 : 1.0;
  if (rule.needs == Needs::kMatrix) {
    slot.matrix_scale = matrix_lr_factor(entry.sizes, options.matrix.adjust_lr);
  }
  slot.rule_idx = group.rule_idx;
  slot.group_idx = static_cast<std::int32_t>(entry.group_idx);
  slot.parameter_format = static_cast<std::uint8_t>(format_of(entry.real_dtype()));
  slot.gradient_format = static_cast<std::uint8_t>(format_of(collected.gradient_dtype(entry)));
  slot.master_kind = static_cast<std::uint8_t>(bound.master);
}

// The slots of one rule and arithmetic go together; of a rule with matrices, as many as there is
// room for their directions.
void DeviceTable::plan_passes() {
  passes_.clear();
  std::int64_t num_direction_bytes = 0;
  const auto num_slots = static_cast<std::int32_t>(parameters_.collected().size());
  for (std::int32_t i = 0; i < num_slots; ++i) {
    const TradewindCudaSlot& slot = image().slots()[static_cast<std::size_t>(i)];
    const bool is_double = static_cast<Format>(slot.parameter_format) == Format::kFloat64;
    auto found = std::find_if(passes_.rbegin(), passes_.rend(), [&](const Pass& pass) {
      return pass.rule_idx == slot.rule_idx && pass.is_double == is_double;
    });
    const RuleInfo& rule = rules()[static_cast<std::size_t>(slot.rule_idx)];
    if (rule.needs == Needs::kMatrix) {
      const std::int64_t bytes = direction_bytes(slot.num_elements, is_double);
      const bool is_full =
          found == passes_.rend() || found->direction_bytes + bytes > max_direction_bytes_;
      if (is_full) found = passes_.rend();
      num_direction_bytes = bytes;
    }
    if (found == passes_.rend()) {
      passes_.push_back({slot.rule_idx, is_double, {}, 0, 0, 0});
      found = passes_.rbegin();
    }
    found->slots.push_back(i);
    if (rule.needs == Needs::kMatrix) found->direction_bytes += num_direction_bytes;
  }
}

void DeviceTable::fill_lists() {
  std::int64_t slot_place = 0;
  std::int64_t block_place = 0;
  for (Pass& pass : passes_) {
    pass.slot_place = slot_place;
    pass.block_place = block_place;
    std::int64_t num_blocks = 0;
    for (const std::int32_t slot : pass.slots) {
      image().list_slots()[static_cast<std::size_t>(slot_place++)] = slot;
      image().list_first_blocks()[static_cast<std::size_t>(block_place++)] = num_blocks;
      num_blocks += num_norm_blocks(image().slots()[static_cast<std::size_t>(slot)].num_elements);
    }
    image().list_first_blocks()[static_cast<std::size_t>(block_place++)] = num_blocks;
  }
}

void DeviceTable::place_directions() {
  std::int64_t most = 0;
  for (const Pass& pass : passes_) most = std::max(most, pass.direction_bytes);
  if (most == 0) return;
  if (!directions_.defined() || directions_.numel() < most) {
    directions_ =
        at::empty({most}, at::TensorOptions().dtype(at::kByte).device(parameters_.device()));
  }
  for (const Pass& pass : passes_) {
    if (pass.direction_bytes == 0) continue;
    auto* place = static_cast<std::byte*>(directions_.mutable_data_ptr());
    for (const std::int32_t idx : pass.slots) {
      TradewindCudaSlot& slot = image().slots()[static_cast<std::size_t>(idx)];
      slot.direction = place;
      place += direction_bytes(slot.num_elements, pass.is_double);
    }
  }
}

void DeviceTable::fill_settings(const DeviceOrders& orders) {
  TradewindCudaSettings& settings = image().settings();
  const auto pointer_to = [&](const at::Tensor& scalar, const char* name) -> const float* {
    if (!scalar.defined()) return nullptr;
    return static_cast<const float*>(scalar_data(scalar, parameters_.device(), name, false));
  };
  settings.gradient_multiplier = orders.gradient_multiplier;
  settings.max_norm = orders.max_norm;
  settings.seed = parameters_.storage().seed;
  settings.grad_scale = pointer_to(orders.grad_scale, "grad_scale");
  settings.found_inf = pointer_to(orders.found_inf, "found_inf");
  settings.growth_factor = loss_scale_.growth_factor;
  settings.backoff_factor = loss_scale_.backoff_factor;
  settings.min_loss_scale = loss_scale_.floor;
  settings.growth_interval = loss_scale_.growth_interval;
  settings.is_measured = orders.measures ? 1 : 0;
  settings.vetoes_nonfinite = orders.vetoes_nonfinite ? 1 : 0;
}

void DeviceTable::measure(void* stream) {
  const c10::DeviceGuard guard(parameters_.device());
  const auto num_slots = static_cast<std::int64_t>(parameters_.collected().size());
  const TradewindCudaTable table = image().table(num_slots);
  check(library_->measure(&table, nullptr, stream));
  check(library_->combine(&table, stream));
}

at::Tensor DeviceTable::sums() const {
  const auto place = static_cast<std::int64_t>(offsetof(TradewindCudaOutcome, sum_of_squares));
  return image_->scalar(image_->outcome_offset() + place, at::kDouble, 2);
}

std::shared_ptr<StepReading> DeviceTable::update(void* stream) {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(parameters_.device());
  parameters_.refresh_masters();
  const auto num_slots = static_cast<std::int64_t>(parameters_.collected().size());
  const TradewindCudaTable table = image().table(num_slots);
  check(library_->control(&table, stream));
  for (const Pass& pass : passes_) run(pass, stream);
  note_slots();
  std::shared_ptr<StepReading> reading = read_back();
  parameters_.finish_update();
  return reading;
}

void DeviceTable::run(const Pass& pass, void* stream) {
  const auto num_slots = static_cast<std::int64_t>(parameters_.collected().size());
  const TradewindCudaTable table = image().table(num_slots);
  const auto num_members = static_cast<std::int64_t>(pass.slots.size());
  const TradewindCudaList members = image().list(pass.slot_place, pass.block_place, num_members);
  const TradewindCudaList* list = num_members == num_slots ? nullptr : &members;
  const auto sweep = [&](int phase, bool wants_changes) {
    check(library_->sweep(&table, list, pass.rule_idx, pass.is_double ? 1 : 0, phase,
                          wants_changes ? 1 : 0, stream));
  };
  const Needs needs = rules()[static_cast<std::size_t>(pass.rule_idx)].needs;
  sweep(TRADEWIND_CUDA_UPDATE, orders_.wants_changes || needs == Needs::kNorms);
  if (needs == Needs::kNorms) check(library_->combine_changes(&table, list, stream));
  if (needs == Needs::kMatrix) orthogonalize_all(pass);
  if (needs != Needs::kElement) sweep(TRADEWIND_CUDA_FINISH, orders_.wants_changes);
  if (orders_.wants_changes) check(library_->combine_changes(&table, list, stream));
}

void DeviceTable::orthogonalize_all(const Pass& pass) {
  for (const std::int32_t idx : pass.slots) {
    const auto& collected = parameters_.collected()[static_cast<std::size_t>(idx)];
    const TradewindCudaSlot& slot = image().slots()[static_cast<std::size_t>(idx)];
    // The gradient lies in the order of the arrays that the sweep walks over.
    orthogonalize(collected.gradient, pass.is_double, slot.direction,
                  groups_[parameters_.entry(collected.idx).group_idx].matrix);
  }
}

// Which parameters the numbers are of. Readings share the list: as a rule it does not change.
void DeviceTable::note_slots() {
  std::vector<StepReading::Slot> slots;
  for (const OptimizerParameters::Collected& collected : parameters_.collected()) {
    slots.push_back({static_cast<std::int64_t>(collected.idx), collected.num_elements()});
  }
  if (!slots_of_reading_ || *slots_of_reading_ != slots) {
    slots_of_reading_ = std::make_shared<const std::vector<StepReading::Slot>>(std::move(slots));
  }
}

std::shared_ptr<StepReading> DeviceTable::read_back() {
  if (!for_capture_ && !orders_.is_capturing) {
    for_capture_ = readings_.take(image().kept().numel());
  }
  const bool is_plain = loss_scale_.growth_interval == 0 && !orders_.measures &&
                        !orders_.found_inf.defined() && !orders_.grad_scale.defined();
  if (is_plain && !orders_.wants_statistics && !orders_.wants_changes) return nullptr;
  StepReading::Places places;
  places.outcome = image().outcome_offset();
  const bool has_slots = orders_.wants_statistics || orders_.wants_changes;
  if (has_slots && orders_.measures) places.measures = image().measures_offset();
  if (orders_.wants_changes) places.changes = image().changes_offset();
  const at::Tensor kept =
      image().kept().narrow(0, 0, has_slots ? image().kept().numel() : image().measures_offset());
  std::shared_ptr<PinnedBuffer> buffer;
  if (!orders_.is_capturing) {
    buffer = readings_.take(image().kept().numel());
  } else if (for_capture_) {
    buffer = captured_.emplace_back(std::move(for_capture_));
  } else {
    return nullptr;
  }
  buffer->copy_from(kept);
  if (!orders_.is_capturing) buffer->mark();
  return std::make_shared<StepReading>(std::move(buffer), places, orders_.is_capturing,
                                       slots_of_reading_);
}

std::shared_ptr<StepReading> DeviceTable::read_again() {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(parameters_.device());
  orders_.is_capturing = false;
  return read_back();
}

void DeviceTable::keep_loss_scale(double initial, const DeviceLossScale& options) {
  const c10::AutoGradMode no_grad(false);
  loss_scale_ = options;
  loss_scale().fill_(initial);
}

at::Tensor DeviceTable::loss_scale() {
  image();
  const auto place = static_cast<std::int64_t>(offsetof(TradewindCudaState, loss_scale));
  return image_->scalar(place, at::kFloat, 1).select(0, 0);
}

at::Tensor DeviceTable::vetoed() {
  image();
  const auto place = static_cast<std::int64_t>(offsetof(TradewindCudaOutcome, vetoed));
  return image_->scalar(image_->outcome_offset() + place, at::kInt, 1).select(0, 0);
}

void DeviceTable::carry_over(DeviceTable& before, const std::vector<std::int64_t>& from_idx) {
  if (!before.image_) return;
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(parameters_.device());
  loss_scale_ = before.loss_scale_;
  const auto num_bytes = static_cast<std::int64_t>(sizeof(TradewindCudaState));
  image().scalar(0, at::kByte, num_bytes).copy_(before.image_->scalar(0, at::kByte, num_bytes));
  for (std::size_t i = 0; i < from_idx.size(); ++i) {
    if (from_idx[i] < 0) continue;
    has_stepped_.select(0, static_cast<std::int64_t>(i))
        .copy_(before.has_stepped_.select(0, from_idx[i]));
  }
}

std::int64_t DeviceTable::num_uploads() const { return image_ ? image_->num_uploads() : 0; }

std::int64_t DeviceTable::collect() {
  sum_gradients();
  return parameters_.collect();
}

void DeviceTable::release_gradients() {
  if (sums_) sums_->clear();
  parameters_.release_gradients();
}

void DeviceTable::hook_sums() {
  hooks_.reset();
  sums_ = std::make_unique<GradientArena>(parameters_.tensors());
  parameters_.take_sums(sums_.get());
  hooks_ = std::make_unique<GradientHooks>(parameters_.tensors(),
                                           [this](std::size_t idx, const at::Tensor& parameter) {
                                             if (sums_->holds(idx))
                                               sums_->ingest_there(idx, parameter);
                                           });
  hooks_->install();
}

void DeviceTable::hook_updates() {
  hooks_.reset();
  backward_update_ = std::make_unique<DeviceBackwardUpdate>(*this);
  hooks_ = std::make_unique<GradientHooks>(
      parameters_.tensors(),
      [this](std::size_t idx, const at::Tensor&) { backward_update_->arrive(idx); });
  hooks_->install();
}

void DeviceTable::install_hooks() {
  if (hooks_) hooks_->install();
}

void DeviceTable::remove_hooks() noexcept {
  if (hooks_) hooks_->remove();
}

void DeviceTable::sum_gradients() {
  for (std::size_t idx = 0; sums_ && idx < parameters_.size(); ++idx) {
    if (sums_->holds(idx)) sums_->ingest_there(idx, parameters_.tensors()[idx]);
  }
}

}  // namespace tradewind
