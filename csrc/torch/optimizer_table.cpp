#include "torch/optimizer_table.h"

#include <ATen/core/DimVector.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "step/stored_array.h"
#include "torch/backward_update.h"
#include "torch/parallel.h"
#include "torch/slot_tensor.h"

namespace tradewind {

struct OptimizerTable::Group {
  int rule_idx;
  GroupState state;

  [[nodiscard]] const RuleInfo& rule() const { return rules()[static_cast<std::size_t>(rule_idx)]; }
};

struct OptimizerTable::Entry {
  std::string name;
  std::size_t group_idx = 0;
  std::size_t slot_idx = 0;  // within the group
  DType dtype = DType::kFloat32;
  at::DimVector sizes, strides;  // state has them too, where they are dense
  bool has_state = false;
  bool is_first = false;
  // The parameter's version after our last write: another one means that somebody else wrote to it.
  std::uint32_t version = 0;

  [[nodiscard]] DType real_dtype() const {
    if (dtype == DType::kComplex64) return DType::kFloat32;
    return dtype == DType::kComplex128 ? DType::kFloat64 : dtype;
  }
};

namespace {

DType check_parameter(const at::Tensor& parameter, const std::string& name) {
  const auto dtype = arena_dtype(parameter.scalar_type());
  if (parameter.layout() != at::kStrided || !parameter.device().is_cpu()) {
    fail(ErrorKind::kBadType, "parameter '", name, "': expected a strided CPU tensor, got ",
         parameter.layout(), " on ", parameter.device());
  }
  if (!dtype || !(is_floating(*dtype) || is_complex(*dtype))) {
    fail(ErrorKind::kBadType, "parameter '", name,
         "': expected float32, float64, bfloat16, float16 or complex, got ",
         dtype_text(parameter.scalar_type()), "; leave it out of the optimizer, or convert it");
  }
  for (std::int64_t dim = 0; dim < parameter.dim(); ++dim) {
    if (parameter.stride(dim) == 0 && parameter.size(dim) > 1) {
      fail(ErrorKind::kBadValue, "parameter '", name,
           "': several of its elements share one place in memory (stride 0); call .contiguous() on "
           "it first");
    }
  }
  return *dtype;
}

void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                    const std::string& name) {
  if (gradient.layout() != at::kStrided) {
    fail(ErrorKind::kBadState, "parameter '", name,
         "': sparse gradients are not supported; use sparse=False in the embedding, or "
         "torch.optim.SparseAdam");
  }
  const auto dtype = arena_dtype(gradient.scalar_type());
  const bool is_number =
      dtype && (parameter.is_complex() ? gradient.scalar_type() == parameter.scalar_type()
                                       : is_floating(*dtype));
  if (!is_number || gradient.device() != parameter.device() ||
      gradient.sizes() != parameter.sizes()) {
    fail(ErrorKind::kBadState, "parameter '", name, "': expected a gradient of ",
         dtype_text(parameter.scalar_type()), " ", shape_text(parameter), " on ",
         parameter.device(), ", got ", dtype_text(gradient.scalar_type()), " ",
         shape_text(gradient), " on ", gradient.device());
  }
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// From the first element's byte to the end of the last one's, gaps included.
std::size_t extent_bytes(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return (static_cast<std::size_t>(last) + 1) * tensor.element_size();
}

// In the dtype of `source` and the order of elements of `like`.
at::Tensor copy_laid_out_like(const at::Tensor& source, const at::Tensor& like) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor plain = source.detach();
  at::Tensor copy = is_dense(like) ? plain.new_empty_strided(like.sizes(), like.strides())
                                   : plain.new_empty(like.sizes());
  return copy.copy_(plain);
}

// A graph that saved the parameter stays good where nothing changes.
void write_if_other(const at::Tensor& parameter, const at::Tensor& values) {
  const at::Tensor plain = parameter.detach();
  if (!plain.equal(values)) plain.copy_(values);
}

// Bits that say "read me differently": the memory alone is not the value.
bool is_lazy_view(const at::Tensor& tensor) { return tensor.is_neg() || tensor.is_conj(); }

void check_storage(const StorageOptions& storage, DType dtype, const std::string& name) {
  const auto refuse = [&](const char* option, const char* expected) {
    fail(ErrorKind::kBadValue, "parameter '", name, "': ", option, " expects ", expected, ", got ",
         dtype_name(dtype), "; leave that option out, or convert the parameter");
  };
  if (storage.master == Master::kSplit && dtype == DType::kFloat16) {
    refuse("masters='split'", "bfloat16 parameters (16 bits cannot hold what float16 lacks)");
  }
  const bool is_plain = storage.states == StatePrecision::kParameter;
  if (!is_plain && (dtype == DType::kFloat64 || is_complex(dtype))) {
    refuse("state_dtype", "float32, bfloat16 or float16 parameters");
  }
}

}  // namespace

OptimizerTable::OptimizerTable(const StorageOptions& storage) : storage_(storage) {}
OptimizerTable::~OptimizerTable() = default;

void OptimizerTable::add_group(std::string_view rule_name,
                               const std::vector<at::Tensor>& parameters,
                               const std::vector<std::string>& names) {
  const int rule_idx = find_rule(rule_name);
  const RuleInfo& rule = rules()[static_cast<std::size_t>(rule_idx)];
  std::vector<DType> dtypes;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Entry entry;
    entry.dtype = check_parameter(parameters[i], names[i]);
    check_storage(storage_, entry.dtype, names[i]);
    const bool is_matrix = parameters[i].dim() == 2 && !is_complex(entry.dtype);
    if (rule.needs == Needs::kMatrix && !is_matrix) {
      fail(ErrorKind::kBadValue, "parameter '", names[i], "': ", rule.name,
           " expects a real matrix (2 dimensions), got ", dtype_name(entry.dtype), " ",
           shape_text(parameters[i]), "; give the others to AdamW");
    }
    entry.name = names[i];
    entry.group_idx = groups_.size();
    entry.slot_idx = i;
    entry.sizes = at::DimVector(parameters[i].sizes());
    entry.strides = at::DimVector(parameters[i].strides());
    dtypes.push_back(entry.dtype);
    shapes.push_back(parameters[i].sizes().vec());
    entries.push_back(std::move(entry));
  }
  groups_.push_back(
      std::make_unique<Group>(Group{rule_idx, GroupState(rule, dtypes, shapes, storage_)}));
  parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
  std::move(entries.begin(), entries.end(), std::back_inserter(entries_));
  if (hooks_) hook_gradients(on_gradient_);
}

void OptimizerTable::begin_collecting() {
  active_.clear();
  active_entries_.clear();
  held_gradients_.clear();
  write_backs_.clear();
  has_measure_ = false;
}

std::int64_t OptimizerTable::collect() {
  sum_gradients();
  begin_collecting();
  std::vector<const void*> memory;
  memory.reserve(parameters_.size());
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    if (!take_gradient(idx)) return kNoLongerFits;
    memory.push_back(parameters_[idx].const_data_ptr());
  }
  if (memory != checked_memory_) check_overlap(std::move(memory));
  return static_cast<std::int64_t>(active_.size());
}

std::int64_t OptimizerTable::collect_some(std::span<const std::size_t> parameter_idx) {
  begin_collecting();
  for (const std::size_t idx : parameter_idx) {
    if (!take_gradient(idx)) return kNoLongerFits;
  }
  return static_cast<std::int64_t>(active_.size());
}

bool OptimizerTable::take_gradient(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const Entry& entry = entries_[idx];
  const bool is_summed = gradient_arena_ && gradient_arena_->holds(idx);
  at::Tensor gradient = is_summed ? gradient_arena_->sum(idx) : parameter.grad();
  if (!gradient.defined()) return true;
  check_gradient(parameter, gradient, entry.name);
  if (!parameter.device().is_cpu()) {
    fail(ErrorKind::kBadState, "parameter '", entry.name,
         "': was on the CPU when the optimizer was "
         "made, is on ",
         parameter.device(), " now; move the model before making the optimizer");
  }
  if (arena_dtype(parameter.scalar_type()) != entry.dtype) {
    fail(ErrorKind::kBadState, "parameter '", entry.name, "': was ", dtype_name(entry.dtype),
         " when the optimizer was made, is ", dtype_text(parameter.scalar_type()),
         " now; convert the model before making the optimizer");
  }
  if (parameter.sizes() != at::IntArrayRef(entry.sizes) ||
      parameter.strides() != at::IntArrayRef(entry.strides)) {
    return false;
  }
  at::Tensor target = parameter;
  if (!is_dense(parameter) || is_lazy_view(parameter)) {
    target = copy_laid_out_like(parameter, parameter);
    write_backs_.push_back({parameter, target});
  }
  // Element i of every array must be the same element: bring the gradient into the parameter's
  // order.
  if (!same_layout(gradient, target) || is_lazy_view(gradient)) {
    gradient = copy_laid_out_like(gradient, target);
  }
  SweepSlot slot;
  slot.dtype = entry.real_dtype();
  slot.gradient_dtype = is_complex(entry.dtype) ? slot.dtype : *arena_dtype(gradient.scalar_type());
  slot.parameter = target.mutable_data_ptr();
  slot.gradient = gradient.const_data_ptr();
  // A complex number is stepped as its two parts, as torch does.
  slot.num_elements = target.numel() * (is_complex(entry.dtype) ? 2 : 1);
  slot.rule_idx = groups_[entry.group_idx]->rule_idx;
  active_.push_back(slot);
  active_entries_.push_back(idx);
  held_gradients_.push_back(std::move(gradient));
  return true;
}

void OptimizerTable::check_overlap(std::vector<const void*> memory) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].numel() > 0) order.push_back(i);
  }
  const auto address = [&](std::size_t i) { return reinterpret_cast<std::uintptr_t>(memory[i]); };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return address(a) < address(b); });
  const auto end = [&](std::size_t i) { return address(i) + extent_bytes(parameters_[i]); };
  for (std::size_t i = 1, furthest = 0; i < order.size(); ++i) {
    const std::size_t before = order[furthest];
    const std::size_t here = order[i];
    // Two with gaps may interleave without touching (columns of one matrix): both are copied and
    // written back one after the other, as torch would step them.
    const bool may_interleave = !is_dense(parameters_[before]) && !is_dense(parameters_[here]);
    if (end(before) > address(here) && !may_interleave) {
      fail(ErrorKind::kBadValue, "parameters '", entries_[before].name, "' and '",
           entries_[here].name,
           "' share memory; to tie weights, use one Parameter object in both places");
    }
    if (end(here) > end(before)) furthest = i;
  }
  checked_memory_ = std::move(memory);
}

const Measure& OptimizerTable::measure() {
  measure_.begin(active_);
  num_hot_ = 0;
  for (std::size_t i = 0; i < active_.size() && hot_measure_; ++i) {
    const auto blocks = hot_measure_->blocks_for(active_entries_[i], held_gradients_[i]);
    if (blocks.empty()) continue;
    measure_.adopt(static_cast<std::int64_t>(i), blocks);
    ++num_hot_;
  }
  measure_.run(kernels(), kTorchParallel);
  has_measure_ = true;
  return measure_;
}

std::string OptimizerTable::first_nonfinite_name() const {
  const std::int64_t slot = measure_.first_nonfinite_slot();
  return slot < 0 ? "" : entries_[active_entries_[static_cast<std::size_t>(slot)]].name;
}

std::vector<std::int64_t> OptimizerTable::missing_state() const {
  std::vector<std::int64_t> missing;
  for (const std::size_t idx : active_entries_) {
    if (!entries_[idx].has_state && !groups_[entries_[idx].group_idx]->state.is_empty()) {
      missing.push_back(static_cast<std::int64_t>(idx));
    }
  }
  return missing;
}

std::vector<std::int64_t> OptimizerTable::missing_state_anywhere() const {
  std::vector<std::int64_t> missing;
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    if (parameters_[idx].requires_grad() && !entries_[idx].has_state &&
        !groups_[entries_[idx].group_idx]->state.is_empty()) {
      missing.push_back(static_cast<std::int64_t>(idx));
    }
  }
  return missing;
}

std::vector<NamedTensor> OptimizerTable::add_state(std::int64_t parameter_idx, bool is_first) {
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  Entry& entry = entries_[idx];
  const GroupState& state = groups_[entry.group_idx]->state;
  entry.has_state = true;
  entry.is_first = is_first;
  if (state.master(entry.slot_idx) != Master::kNone) {
    set_master(parameter_idx, parameter.detach().to(at::kFloat));
  }
  return state.tensors(entry.slot_idx,
                       is_dense(parameter) ? parameter : copy_laid_out_like(parameter, parameter));
}

void OptimizerTable::set_state(std::int64_t parameter_idx, std::int64_t state_idx,
                               const at::Tensor& values) {
  const c10::AutoGradMode no_grad(false);
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const auto state = static_cast<std::size_t>(state_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  const Entry& entry = entries_[idx];
  const GroupState& group = groups_[entry.group_idx]->state;
  const at::Tensor like =
      is_dense(parameter) ? parameter : copy_laid_out_like(parameter, parameter);
  SweepSlot slot;
  group.bind(entry.slot_idx, slot);
  const Format format = group.format(entry.slot_idx, state);
  if (is_blockwise(format)) {
    const at::Tensor floats = copy_laid_out_like(values.to(at::kFloat), like);
    encode_blocks(static_cast<const float*>(floats.const_data_ptr()), floats.numel(),
                  format == Format::kSigned8, static_cast<std::uint8_t*>(slot.states[state]),
                  slot.exponents[state]);
    return;
  }
  const std::string name(groups_[entry.group_idx]->rule().state_names[state]);
  for (NamedTensor& named : group.tensors(entry.slot_idx, like)) {
    if (named.name == name) named.tensor.copy_(values);
  }
}

void OptimizerTable::set_master(std::int64_t parameter_idx, const at::Tensor& values) {
  const c10::AutoGradMode no_grad(false);
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  Entry& entry = entries_[idx];
  SweepSlot slot;
  groups_[entry.group_idx]->state.bind(entry.slot_idx, slot);
  const at::Tensor like =
      is_dense(parameter) ? parameter.detach() : copy_laid_out_like(parameter, parameter);
  const at::Tensor floats = copy_laid_out_like(values.to(at::kFloat), like);
  if (slot.master == Master::kSplit) {
    at::Tensor high = copy_laid_out_like(like, like);
    split_floats(static_cast<const float*>(floats.const_data_ptr()), floats.numel(),
                 static_cast<std::uint16_t*>(high.mutable_data_ptr()),
                 static_cast<std::uint16_t*>(slot.master_data));
    write_if_other(parameter, high);
  } else {
    std::memcpy(slot.master_data, floats.const_data_ptr(),
                static_cast<std::size_t>(floats.numel()) * sizeof(float));
    write_if_other(parameter, floats.to(parameter.scalar_type()));
  }
  entry.version = version_of(parameter);
}

at::Tensor OptimizerTable::master_values(std::int64_t parameter_idx) const {
  const c10::AutoGradMode no_grad(false);
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  const Entry& entry = entries_[idx];
  SweepSlot slot;
  groups_[entry.group_idx]->state.bind(entry.slot_idx, slot);
  if (!entry.has_state || slot.master == Master::kNone) return {};
  const at::Tensor like = copy_laid_out_like(parameter, parameter);
  at::Tensor floats = copy_laid_out_like(like.to(at::kFloat), like);
  auto* out = static_cast<float*>(floats.mutable_data_ptr());
  if (slot.master == Master::kSplit) {
    join_floats(static_cast<const std::uint16_t*>(like.const_data_ptr()),
                static_cast<const std::uint16_t*>(slot.master_data), floats.numel(), out);
  } else {
    std::memcpy(out, slot.master_data, static_cast<std::size_t>(floats.numel()) * sizeof(float));
  }
  return floats;
}

// Somebody wrote to the parameter: what differs from its master's rounding is the new value. A
// split master needs nothing: its low halves stay within the rounding of whatever is written.
void OptimizerTable::refresh_master(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& parameter = parameters_[idx];
  const auto parameter_idx = static_cast<std::int64_t>(idx);
  const at::Tensor master = master_values(parameter_idx);
  const at::Tensor plain = parameter.detach();
  const at::Tensor is_same = master.to(parameter.scalar_type()).eq(plain);
  set_master(parameter_idx, master.where(is_same, plain.to(at::kFloat)));
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
  Key last{entries_.size() + 1, 0, false, false};
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const std::size_t idx = active_entries_[i];
    const Entry& entry = entries_[idx];
    const Group& group = *groups_[entry.group_idx];
    const float* counter = group.state.step(entry.slot_idx);
    const std::int64_t step = counter == nullptr ? 1 : std::llround(*counter) + 1;
    const Key key{entry.group_idx, step, entry.is_first, active_[i].dtype == DType::kFloat64};
    const GroupOptions& options = groups[entry.group_idx];
    if (scalars_.empty() || !(key == last)) {
      const auto fill = key.is_double ? group.rule().scalars_double : group.rule().scalars_float;
      fill(options.values.data(), step, entry.is_first, &scalars_.emplace_back());
      last = key;
    }
    active_[i].scalars_idx = static_cast<std::int64_t>(scalars_.size()) - 1;
    active_[i].sign = options.maximize ? -1.0 : 1.0;
    active_[i].random_key = random_key(storage_.seed, step, static_cast<std::int64_t>(idx));
    if (group.rule().needs == Needs::kMatrix) {
      active_[i].matrix_scale = matrix_lr_factor(entry.sizes, options.matrix.adjust_lr);
    }
    group.state.bind(entry.slot_idx, active_[i]);
  }
}

void OptimizerTable::check_options(const std::vector<GroupOptions>& groups) const {
  if (groups.size() != groups_.size()) {
    fail(ErrorKind::kBadValue, "sweep: expected options for ", groups_.size(), " groups, got ",
         groups.size());
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const RuleInfo& rule = groups_[g]->rule();
    if (groups[g].values.size() != rule.option_names.size()) {
      fail(ErrorKind::kBadValue, "group ", g, ": expected ", rule.option_names.size(),
           " options, got ", groups[g].values.size());
    }
    for (std::size_t i = 0; i < rule.option_names.size(); ++i) {
      if (std::isnan(groups[g].values[i])) {
        fail(ErrorKind::kBadValue, "param group ", g, ": expected a number for ",
             rule.option_names[i], ", got NaN; nothing was updated");
      }
    }
  }
}

void OptimizerTable::sweep(const std::vector<GroupOptions>& groups, double gradient_multiplier,
                           bool wants_changes) {
  check_options(groups);
  for (const std::size_t idx : active_entries_) {
    const Entry& entry = entries_[idx];
    const bool has_master = groups_[entry.group_idx]->state.master(entry.slot_idx) != Master::kNone;
    if (has_master && entry.version != version_of(parameters_[idx])) refresh_master(idx);
  }
  make_scalars(groups);
  const MatrixTransform transform = [&](std::int64_t slot_idx, void* direction) {
    const std::size_t idx = active_entries_[static_cast<std::size_t>(slot_idx)];
    // held_gradients_ lie in the order of the arrays that the sweep walks over.
    orthogonalize(held_gradients_[static_cast<std::size_t>(slot_idx)],
                  entries_[idx].dtype == DType::kFloat64, direction,
                  groups[entries_[idx].group_idx].matrix);
  };
  sweep_.run(active_, scalars_, {gradient_multiplier, wants_changes, &transform}, kernels(),
             kTorchParallel);
  take_statistics(wants_changes);
  for (const std::size_t idx : active_entries_) {
    Entry& entry = entries_[idx];
    float* const counter = groups_[entry.group_idx]->state.step(entry.slot_idx);
    if (counter != nullptr) *counter += 1.0F;
    entry.is_first = false;
    // As any in-place operation: a graph that saved this parameter can tell.
    parameters_[idx].unsafeGetTensorImpl()->bump_version();
  }
  const c10::AutoGradMode no_grad(false);
  for (const WriteBack& back : write_backs_) back.parameter.detach().copy_(back.dense);
  for (const std::size_t idx : active_entries_)
    entries_[idx].version = version_of(parameters_[idx]);
  active_.clear();
  active_entries_.clear();
  held_gradients_.clear();
  write_backs_.clear();
}

void OptimizerTable::skip() {
  take_statistics(false);
  begin_collecting();
}

void OptimizerTable::take_statistics(bool has_changes) {
  statistics_.clear();
  for (std::size_t i = 0; i < active_.size(); ++i) {
    statistics_.push_back({static_cast<std::int64_t>(active_entries_[i]), active_[i].num_elements,
                           has_measure_ ? measure_.slots()[i] : SlotMeasure{},
                           has_changes ? sweep_.changes()[i] : SlotChange{}});
  }
  has_measure_ = false;
}

void OptimizerTable::release_gradients() {
  begin_collecting();
  if (gradient_arena_) gradient_arena_->clear();
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

const std::string& OptimizerTable::name(std::size_t idx) const { return entries_[idx].name; }

void OptimizerTable::hook_gradients(OnGradient action) {
  hooks_.reset();
  on_gradient_ = action;
  hot_measure_ = std::make_unique<HotMeasure>(parameters_.size());
  gradient_arena_ =
      action == OnGradient::kSum ? std::make_unique<GradientArena>(parameters_) : nullptr;
  backward_update_ =
      action == OnGradient::kUpdate ? std::make_unique<BackwardUpdate>(*this) : nullptr;
  hooks_ = std::make_unique<GradientHooks>(parameters_,
                                           [this](std::size_t idx, const at::Tensor& parameter) {
                                             if (backward_update_) {
                                               backward_update_->arrive(idx);
                                             } else {
                                               take_hot(idx, parameter);
                                             }
                                           });
  hooks_->install();
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
      gradient_arena_->ingest(idx, parameters_[idx], *hot_measure_, false);
    }
  }
}

}  // namespace tradewind
