#include "torch/optimizer_parameters.h"

#include <c10/core/GradMode.h>

#include <cmath>
#include <utility>

#include "base/error.h"
#include "step/stored_array.h"
#include "torch/gated_write.h"
#include "torch/parameter_checks.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.to(at::kCPU); }

at::Tensor dense_form(const at::Tensor& parameter) {
  return is_dense(parameter) ? parameter.detach() : copy_laid_out_like(parameter, parameter);
}

// A graph that saved the parameter stays good where nothing changes.
void write_if_other(const at::Tensor& parameter, const at::Tensor& values) {
  const at::Tensor plain = parameter.detach();
  const at::Tensor rounded = values.to(plain.options());
  if (!plain.equal(rounded)) copy_gated(plain, rounded);
}

}  // namespace

DType OptimizerParameters::Collected::gradient_dtype(const Entry& entry) const {
  return is_complex(entry.dtype) ? entry.real_dtype() : *arena_dtype(gradient.scalar_type());
}

void OptimizerParameters::add_group(std::string_view rule_name,
                                    const std::vector<at::Tensor>& parameters,
                                    const std::vector<std::string>& names) {
  const int rule_idx = find_rule(rule_name);
  const RuleInfo& rule = rules()[static_cast<std::size_t>(rule_idx)];
  std::vector<DType> dtypes;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Entry entry;
    entry.dtype = check_parameter(parameters[i], device_, names[i]);
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
  groups_.push_back(std::make_unique<Group>(
      Group{rule_idx, GroupState(rule, dtypes, shapes, storage_, device_)}));
  parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
  std::move(entries.begin(), entries.end(), std::back_inserter(entries_));
}

std::int64_t OptimizerParameters::collect() {
  forget();
  std::vector<const void*> memory;
  memory.reserve(parameters_.size());
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    if (!take_gradient(idx)) return kNoLongerFits;
    memory.push_back(parameters_[idx].const_data_ptr());
  }
  if (memory != checked_memory_) {
    std::vector<std::string> names;
    for (const Entry& entry : entries_) names.push_back(entry.name);
    check_overlap(parameters_, names);
    checked_memory_ = std::move(memory);
  }
  return static_cast<std::int64_t>(collected_.size());
}

std::int64_t OptimizerParameters::collect_some(std::span<const std::size_t> parameter_idx) {
  forget();
  for (const std::size_t idx : parameter_idx) {
    if (!take_gradient(idx)) return kNoLongerFits;
  }
  return static_cast<std::int64_t>(collected_.size());
}

void OptimizerParameters::check_unchanged(const at::Tensor& parameter, const Entry& entry) const {
  if (parameter.device() != device_) {
    fail(ErrorKind::kBadState, "parameter '", entry.name, "': was on ",
         device_.is_cpu() ? std::string("the CPU") : device_.str(),
         " when the optimizer was made, is on ", parameter.device(),
         " now; move the model before making the optimizer");
  }
  if (arena_dtype(parameter.scalar_type()) != entry.dtype) {
    fail(ErrorKind::kBadState, "parameter '", entry.name, "': was ", dtype_name(entry.dtype),
         " when the optimizer was made, is ", dtype_text(parameter.scalar_type()),
         " now; convert the model before making the optimizer");
  }
}

at::Tensor OptimizerParameters::gradient_of(std::size_t idx) const {
  if (idx < given_.size() && given_[idx].defined()) return given_[idx];
  if (sums_ != nullptr && sums_->holds(idx)) return sums_->sum(idx);
  return parameters_[idx].grad();
}

bool OptimizerParameters::take_gradient(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const Entry& entry = entries_[idx];
  at::Tensor gradient = gradient_of(idx);
  if (!gradient.defined()) return true;
  check_gradient(parameter, gradient, entry.name);
  check_unchanged(parameter, entry);
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
  collected_.push_back({idx, std::move(target), std::move(gradient)});
  return true;
}

std::vector<std::int64_t> OptimizerParameters::missing_state() const {
  std::vector<std::int64_t> missing;
  for (const Collected& collected : collected_) {
    const Entry& entry = entries_[collected.idx];
    if (!entry.has_state && !group_of(entry).state.is_empty()) {
      missing.push_back(static_cast<std::int64_t>(collected.idx));
    }
  }
  return missing;
}

std::vector<std::int64_t> OptimizerParameters::missing_state_anywhere() const {
  std::vector<std::int64_t> missing;
  for (std::size_t idx = 0; idx < entries_.size(); ++idx) {
    const Entry& entry = entries_[idx];
    if (parameters_[idx].requires_grad() && !entry.has_state && !group_of(entry).state.is_empty()) {
      missing.push_back(static_cast<std::int64_t>(idx));
    }
  }
  return missing;
}

std::vector<NamedTensor> OptimizerParameters::add_state(std::int64_t parameter_idx, bool is_first) {
  const c10::AutoGradMode no_grad(false);
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  Entry& entry = entries_[idx];
  const GroupState& state = group_of(entry).state;
  entry.has_state = true;
  entry.is_first = is_first;
  // A split one is right as it is: 16-bit values lack nothing.
  if (state.master(entry.slot_idx) == Master::kFloat32) {
    copy_gated(state_of(idx, "master"), parameter);
  }
  entry.version = version_of(parameter);
  return state.tensors(entry.slot_idx, dense_form(parameter));
}

at::Tensor OptimizerParameters::state_of(std::size_t idx, std::string_view name) const {
  const Entry& entry = entries_[idx];
  for (NamedTensor& named :
       group_of(entry).state.tensors(entry.slot_idx, dense_form(parameters_[idx]))) {
    if (named.name == name) return named.tensor;
  }
  fail(ErrorKind::kBadValue, "parameter '", entry.name, "': has no state '", name, "'");
}

void OptimizerParameters::set_state(std::int64_t parameter_idx, std::int64_t state_idx,
                                    const at::Tensor& values) {
  const c10::AutoGradMode no_grad(false);
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const auto number = static_cast<std::size_t>(state_idx);
  const Entry& entry = entries_.at(idx);
  const Group& group = group_of(entry);
  const std::string name(group.rule().state_names[number]);
  const at::Tensor state = state_of(idx, name);
  const Format format = group.state.format(entry.slot_idx, number);
  if (!is_blockwise(format)) {
    copy_gated(state, values);
    return;
  }
  const at::Tensor exponents = state_of(idx, name + "_exponents");
  at::Tensor codes_there = on_cpu(state);
  at::Tensor exponents_there = on_cpu(exponents);
  const at::Tensor floats = copy_laid_out_like(on_cpu(values).to(at::kFloat), codes_there);
  wait_for_gate(codes_there);
  wait_for_gate(exponents_there);
  encode_blocks(static_cast<const float*>(floats.const_data_ptr()), floats.numel(),
                format == Format::kSigned8,
                static_cast<std::uint8_t*>(codes_there.mutable_data_ptr()),
                static_cast<std::uint8_t*>(exponents_there.mutable_data_ptr()));
  if (device_.is_cpu()) return;
  state.copy_(codes_there);
  exponents.copy_(exponents_there);
}

void OptimizerParameters::set_master(std::int64_t parameter_idx, const at::Tensor& values) {
  const c10::AutoGradMode no_grad(false);
  const auto idx = static_cast<std::size_t>(parameter_idx);
  const at::Tensor& parameter = parameters_.at(idx);
  Entry& entry = entries_[idx];
  if (group_of(entry).state.master(entry.slot_idx) == Master::kSplit) {
    at::Tensor low = on_cpu(state_of(idx, "master_low"));
    const at::Tensor floats = copy_laid_out_like(on_cpu(values).to(at::kFloat), low);
    at::Tensor high = low.to(at::kBFloat16);
    wait_for_gate(low);
    split_floats(static_cast<const float*>(floats.const_data_ptr()), floats.numel(),
                 static_cast<std::uint16_t*>(high.mutable_data_ptr()),
                 static_cast<std::uint16_t*>(low.mutable_data_ptr()));
    if (!device_.is_cpu()) state_of(idx, "master_low").copy_(low);
    write_if_other(parameter, high);
  } else {
    const at::Tensor master = state_of(idx, "master");
    copy_gated(master, values);
    write_if_other(parameter, master);
  }
  entry.version = version_of(parameter);
}

// Somebody wrote to the parameter: what differs from its master's rounding is the new value.
void OptimizerParameters::refresh_master(std::size_t idx) {
  const at::Tensor plain = parameters_[idx].detach();
  const at::Tensor master = state_of(idx, "master");
  const at::Tensor is_same = master.to(plain.scalar_type()).eq(plain);
  set_master(static_cast<std::int64_t>(idx), master.where(is_same, plain.to(at::kFloat)));
}

void OptimizerParameters::refresh_masters() {
  const c10::AutoGradMode no_grad(false);
  for (const Collected& collected : collected_) {
    const Entry& entry = entries_[collected.idx];
    // A split master needs nothing: it stays within the rounding of whatever is written.
    const bool has_whole = group_of(entry).state.master(entry.slot_idx) == Master::kFloat32;
    if (has_whole && entry.version != version_of(parameters_[collected.idx])) {
      refresh_master(collected.idx);
    }
  }
}

void OptimizerParameters::check_options(const std::vector<GroupOptions>& groups) const {
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

std::vector<MemoryRange> OptimizerParameters::memory() const {
  std::vector<MemoryRange> ranges;
  for (const auto& group : groups_) {
    const std::vector<MemoryRange> own = group->state.memory();
    ranges.insert(ranges.end(), own.begin(), own.end());
  }
  return ranges;
}

void OptimizerParameters::finish_update() {
  const c10::AutoGradMode no_grad(false);
  for (const Collected& collected : collected_) {
    // As any in-place operation: a graph that saved this parameter can tell.
    parameters_[collected.idx].unsafeGetTensorImpl()->bump_version();
  }
  for (const WriteBack& back : write_backs_) copy_gated(back.parameter.detach(), back.dense);
  for (const Collected& collected : collected_) {
    entries_[collected.idx].version = version_of(parameters_[collected.idx]);
  }
  forget();
}

void OptimizerParameters::forget() {
  collected_.clear();
  write_backs_.clear();
}

void OptimizerParameters::release_gradients() {
  forget();
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

}  // namespace tradewind
