#include "torch/optimizer_table.h"

#include <ATen/core/DimVector.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "torch/parallel.h"
#include "torch/slot_tensor.h"

namespace tradewind {

// One param group: its rule and, per state and dtype, one arena that is laid out like the group.
struct OptimizerTable::Group {
  int rule_idx = 0;
  Layout layout = Layout::make({});
  std::vector<std::vector<std::shared_ptr<ArenaMemory>>> state_arenas;  // [state][arena]
  std::shared_ptr<ArenaMemory> steps;

  [[nodiscard]] const RuleInfo& rule() const { return rules()[static_cast<std::size_t>(rule_idx)]; }
};

struct OptimizerTable::Entry {
  std::string name;
  std::size_t group_idx = 0;
  std::size_t slot_idx = 0;  // within the group's layout
  DType dtype = DType::kFloat32;
  at::DimVector sizes, strides;  // state has them too, where they are dense
  bool has_state = false;
  bool is_first = false;
  void* states[kMaxStates] = {};
  float* step = nullptr;
};

namespace {

DType check_parameter(const at::Tensor& parameter, const std::string& name) {
  const auto dtype = arena_dtype(parameter.scalar_type());
  if (parameter.layout() != at::kStrided || !parameter.device().is_cpu()) {
    fail(ErrorKind::kBadType, "parameter '", name, "': expected a strided CPU tensor, got ",
         parameter.layout(), " on ", parameter.device());
  }
  if (!dtype || !is_floating(*dtype)) {
    fail(ErrorKind::kBadType, "parameter '", name,
         "': expected float32, float64, bfloat16 or float16, got ",
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
         "': does not support sparse gradients; use sparse=False in the embedding, or "
         "torch.optim.SparseAdam");
  }
  if (gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device() || gradient.sizes() != parameter.sizes()) {
    fail(ErrorKind::kBadState, "parameter '", name, "': expected a gradient of ",
         dtype_text(parameter.scalar_type()), " ", shape_text(parameter), " on ",
         parameter.device(), ", got ", dtype_text(gradient.scalar_type()), " ",
         shape_text(gradient), " on ", gradient.device());
  }
}

// From the first element's byte to the end of the last one's, gaps included.
std::size_t extent_bytes(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return (static_cast<std::size_t>(last) + 1) * tensor.element_size();
}

at::Tensor copy_laid_out_like(const at::Tensor& source, const at::Tensor& like) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor copy = is_dense(like) ? like.detach().new_empty_strided(like.sizes(), like.strides())
                                   : like.detach().new_empty(like.sizes());
  return copy.copy_(source.detach());
}

}  // namespace

OptimizerTable::OptimizerTable() = default;
OptimizerTable::~OptimizerTable() = default;

void OptimizerTable::add_group(std::string_view rule_name,
                               const std::vector<at::Tensor>& parameters,
                               const std::vector<std::string>& names) {
  auto group = std::make_shared<Group>();
  group->rule_idx = find_rule(rule_name);
  std::vector<SlotSpec> specs;
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Entry entry;
    entry.dtype = check_parameter(parameters[i], names[i]);
    entry.name = names[i];
    entry.group_idx = groups_.size();
    entry.slot_idx = i;
    entry.sizes = at::DimVector(parameters[i].sizes());
    entry.strides = at::DimVector(parameters[i].strides());
    // By index: users may repeat names, or leave them empty.
    specs.push_back({std::to_string(i), parameters[i].sizes().vec(), entry.dtype});
    entries.push_back(std::move(entry));
  }
  group->layout = Layout::make(specs);
  for (std::size_t state = 0; state < group->rule().state_names.size(); ++state) {
    auto& arenas = group->state_arenas.emplace_back();
    for (const ArenaSpec& arena : group->layout.arenas()) {
      arenas.push_back(std::make_shared<ArenaMemory>(arena.size_bytes, ArenaMemory::Fork::kHide));
    }
  }
  if (group->rule().counts_steps) {
    group->steps = std::make_shared<ArenaMemory>(
        static_cast<std::int64_t>(parameters.size() * sizeof(float)), ArenaMemory::Fork::kHide);
  }
  groups_.push_back(std::move(group));
  parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
  std::move(entries.begin(), entries.end(), std::back_inserter(entries_));
  if (hot_measure_) enable_hot_measure();
}

std::int64_t OptimizerTable::collect() {
  active_.clear();
  active_entries_.clear();
  held_gradients_.clear();
  write_backs_.clear();
  std::vector<const void*> memory;
  memory.reserve(parameters_.size());
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    if (!take_gradient(idx)) return kNoLongerFits;
    memory.push_back(parameters_[idx].const_data_ptr());
  }
  if (memory != checked_memory_) check_overlap(std::move(memory));
  return static_cast<std::int64_t>(active_.size());
}

bool OptimizerTable::take_gradient(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const Entry& entry = entries_[idx];
  at::Tensor gradient = parameter.grad();
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
  if (!is_dense(parameter) || parameter.is_neg()) {
    target = copy_laid_out_like(parameter, parameter);
    write_backs_.push_back({parameter, target});
  }
  // Element i of every array must be the same element: bring the gradient into the parameter's
  // order.
  if (!same_layout(gradient, target) || gradient.is_neg()) {
    gradient = copy_laid_out_like(gradient, target);
  }
  SweepSlot slot{entry.dtype,
                 target.mutable_data_ptr(),
                 gradient.const_data_ptr(),
                 {},
                 target.numel(),
                 groups_[entry.group_idx]->rule_idx,
                 1.0,
                 0};
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
    const auto sums =
        hot_measure_->sums_for(static_cast<std::int64_t>(active_entries_[i]), held_gradients_[i]);
    if (sums.empty()) continue;
    measure_.adopt(static_cast<std::int64_t>(i), sums);
    ++num_hot_;
  }
  measure_.run(kernels(), kTorchParallel);
  return measure_;
}

std::string OptimizerTable::first_nonfinite_name() const {
  const std::int64_t slot = measure_.first_nonfinite_slot();
  return slot < 0 ? "" : entries_[active_entries_[static_cast<std::size_t>(slot)]].name;
}

std::vector<std::int64_t> OptimizerTable::missing_state() const {
  std::vector<std::int64_t> missing;
  for (const std::size_t idx : active_entries_) {
    const RuleInfo& rule = groups_[entries_[idx].group_idx]->rule();
    if (!entries_[idx].has_state && (rule.counts_steps || !rule.state_names.empty())) {
      missing.push_back(static_cast<std::int64_t>(idx));
    }
  }
  return missing;
}

OptimizerTable::State OptimizerTable::add_state(std::int64_t parameter_idx, bool is_first) {
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  Entry& entry = entries_[idx];
  const Group& group = *groups_[entry.group_idx];
  const Slot& slot = group.layout.slots()[entry.slot_idx];
  const at::Tensor like =
      is_dense(parameter) ? parameter : copy_laid_out_like(parameter, parameter);
  State state;
  for (std::size_t i = 0; i < group.state_arenas.size(); ++i) {
    const auto& arena = group.state_arenas[i][static_cast<std::size_t>(slot.arena_idx)];
    entry.states[i] = arena->data() + slot.offset_bytes;
    state.tensors.push_back(tensor_over(like, entry.states[i], arena));
  }
  if (group.steps) {
    entry.step = reinterpret_cast<float*>(group.steps->data()) + entry.slot_idx;
    const at::Tensor scalar = like.detach().new_empty({}, at::TensorOptions().dtype(at::kFloat));
    state.step = tensor_over(scalar, entry.step, group.steps);
  }
  entry.has_state = true;
  entry.is_first = is_first;
  return state;
}

std::vector<ScalarBlock> OptimizerTable::make_scalars(const std::vector<GroupOptions>& groups) {
  std::vector<ScalarBlock> scalars;
  struct Key {
    std::size_t group_idx;
    std::int64_t step;
    bool is_first, is_double;
    bool operator==(const Key&) const = default;
  };
  Key last{entries_.size() + 1, 0, false, false};
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const Entry& entry = entries_[active_entries_[i]];
    const RuleInfo& rule = groups_[entry.group_idx]->rule();
    const std::int64_t step = entry.step == nullptr ? 1 : std::llround(*entry.step) + 1;
    const Key key{entry.group_idx, step, entry.is_first, entry.dtype == DType::kFloat64};
    if (scalars.empty() || !(key == last)) {
      const double* options = groups[entry.group_idx].values.data();
      auto& fill = key.is_double ? rule.scalars_double : rule.scalars_float;
      fill(options, step, entry.is_first, &scalars.emplace_back());
      last = key;
    }
    active_[i].scalars_idx = static_cast<std::int64_t>(scalars.size()) - 1;
    active_[i].sign = groups[entry.group_idx].maximize ? -1.0 : 1.0;
    std::copy(std::begin(entry.states), std::end(entry.states), std::begin(active_[i].states));
  }
  return scalars;
}

void OptimizerTable::sweep(const std::vector<GroupOptions>& groups, double gradient_multiplier) {
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
  const std::vector<ScalarBlock> scalars = make_scalars(groups);
  tradewind::sweep(active_, scalars, gradient_multiplier, kernels(), kTorchParallel);
  for (const std::size_t idx : active_entries_) {
    Entry& entry = entries_[idx];
    if (entry.step != nullptr) *entry.step += 1.0F;
    entry.is_first = false;
    // As any in-place operation: a graph that saved this parameter can tell.
    parameters_[idx].unsafeGetTensorImpl()->bump_version();
  }
  const c10::AutoGradMode no_grad(false);
  for (const WriteBack& back : write_backs_) back.parameter.detach().copy_(back.dense);
  active_.clear();
  active_entries_.clear();
  held_gradients_.clear();
  write_backs_.clear();
}

void OptimizerTable::release_gradients() {
  held_gradients_.clear();
  active_.clear();
  active_entries_.clear();
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

void OptimizerTable::enable_hot_measure() {
  hot_measure_ = std::make_unique<HotMeasure>(parameters_);
  hot_measure_->install();
}

}  // namespace tradewind
