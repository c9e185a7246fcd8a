#include "torch/parameter_arena.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/gated_write.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

Layout make_layout(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                   const LayoutOptions& options) {
  std::vector<SlotSpec> specs;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto dtype = arena_dtype(parameters[i].scalar_type());
    if (!dtype) {
      fail(ErrorKind::kBadType, "parameter '", names[i], "': an arena cannot hold ",
           dtype_text(parameters[i].scalar_type()));
    }
    specs.push_back({names[i], parameters[i].sizes().vec(), *dtype});
  }
  return Layout::make(specs, options);
}

void check_separate_memory(const std::vector<at::Tensor>& parameters,
                           const std::vector<std::string>& names) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].numel() > 0) order.push_back(i);
  }
  const auto address = [&](std::size_t i) {
    return reinterpret_cast<std::uintptr_t>(parameters[i].const_data_ptr());
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return address(a) < address(b); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (address(order[i - 1]) + parameters[order[i - 1]].nbytes() > address(order[i])) {
      fail(ErrorKind::kBadValue, "parameters '", names[order[i - 1]], "' and '", names[order[i]],
           "' share memory; to tie weights, use one Parameter object in both places");
    }
  }
}

}  // namespace

ParameterArena::ParameterArena(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                               const LayoutOptions& options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      layout_(make_layout(parameters_, names_, options)) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) check(i);
  check_separate_memory(parameters_, names_);
  for (const ArenaSpec& arena : layout_.arenas()) {
    arenas_.push_back(
        allocate_zeroed(arena.size_bytes, parameters_[0].device(), ArenaMemory::Fork::kShare));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& arena = arenas_[static_cast<std::size_t>(layout_.slots()[i].arena_idx)];
    homes_.push_back(tensor_over(parameters_[i], slot_data(i), arena.keeper));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) move_in(i);
}

void ParameterArena::check(std::size_t idx) const {
  const at::Tensor& parameter = parameters_[idx];
  const c10::Device device = parameters_[0].device();
  if (parameter.layout() != at::kStrided || parameter.device() != device) {
    fail(ErrorKind::kBadType, "parameter '", names_[idx], "': expected a strided tensor on ",
         device, ", got ", parameter.layout(), " on ", parameter.device());
  }
  if (!is_dense(parameter)) {
    fail(ErrorKind::kBadValue, "parameter '", names_[idx], "': expected dense memory, got strides ",
         parameter.strides(), " for shape ", shape_text(parameter),
         "; make it contiguous before the Engine takes the model");
  }
}

std::byte* ParameterArena::slot_data(std::size_t idx) const {
  const Slot& slot = layout_.slots()[idx];
  return arenas_[static_cast<std::size_t>(slot.arena_idx)].data + slot.offset_bytes;
}

void ParameterArena::move_in(std::size_t idx) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& parameter = parameters_[idx];
  copy_gated(homes_[idx], parameter.detach());
  // Another TensorImpl over the same storage: set_data takes the given one's storage over.
  parameter.set_data(homes_[idx].detach());
}

std::vector<std::int64_t> ParameterArena::find_strayed() const {
  std::vector<std::int64_t> strayed;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    const at::Tensor& home = homes_[i];
    if (parameter.scalar_type() != home.scalar_type() || parameter.device() != home.device() ||
        parameter.sizes() != home.sizes()) {
      fail(ErrorKind::kBadState, "parameter '", names_[i], "': the Engine adopted ",
           dtype_text(home.scalar_type()), " ", shape_text(home), " on ", home.device(), ", found ",
           dtype_text(parameter.scalar_type()), " ", shape_text(parameter), " on ",
           parameter.device(),
           "; call .to(), .half() or resize before the model is given to the Engine");
    }
    if (parameter.const_data_ptr() != home.const_data_ptr() && home.numel() > 0) {
      strayed.push_back(static_cast<std::int64_t>(i));
    }
  }
  return strayed;
}

std::vector<std::int64_t> ParameterArena::bring_home() {
  std::vector<std::int64_t> strayed = find_strayed();
  for (const std::int64_t idx : strayed) move_in(static_cast<std::size_t>(idx));
  return strayed;
}

void ParameterArena::wait_to_bring_home() const {
  for (const std::int64_t idx : find_strayed()) {
    wait_for_gate(homes_[static_cast<std::size_t>(idx)]);
  }
}

std::vector<MemoryRange> ParameterArena::memory() const {
  std::vector<MemoryRange> ranges;
  if (parameters_.empty() || !parameters_[0].device().is_cpu()) return ranges;
  for (std::size_t i = 0; i < arenas_.size(); ++i) {
    ranges.push_back({arenas_[i].data, layout_.arenas()[i].size_bytes});
  }
  return ranges;
}

std::int64_t ParameterArena::size_bytes() const {
  std::int64_t bytes = 0;
  for (const ArenaSpec& arena : layout_.arenas()) bytes += arena.size_bytes;
  return bytes;
}

}  // namespace tradewind
