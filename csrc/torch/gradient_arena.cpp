#include "torch/gradient_arena.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>

#include "arena/layout.h"
#include "base/error.h"
#include "step/kernels.h"
#include "torch/parameter_checks.h"
#include "torch/slot_tensor.h"

namespace tradewind {

namespace {

bool is_summed(const at::Tensor& parameter) {
  const auto type = parameter.scalar_type();
  return parameter.layout() == at::kStrided && is_dense(parameter) &&
         (type == at::kBFloat16 || type == at::kHalf);
}

void check(const at::Tensor& gradient, const at::Tensor& parameter) {
  const auto dtype = arena_dtype(gradient.scalar_type());
  const bool is_taken = gradient.layout() == at::kStrided &&
                        gradient.device() == parameter.device() && dtype &&
                        kernels().ingest[static_cast<int>(*dtype)] != nullptr &&
                        gradient.sizes() == parameter.sizes();
  if (is_taken) return;
  fail(ErrorKind::kBadState,
       "accumulation: expected a dense gradient of float32, bfloat16 or "
       "float16 and shape ",
       shape_text(parameter), ", got ", dtype_text(gradient.scalar_type()), " ", gradient.layout(),
       " ", shape_text(gradient), "; sparse gradients: use sparse=False in the embedding");
}

}  // namespace

GradientArena::GradientArena(const std::vector<at::Tensor>& parameters) {
  std::vector<SlotSpec> specs;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    SlotSpec& spec = specs.emplace_back();
    spec.name = std::to_string(i);
    spec.shape = {is_summed(parameters[i]) ? parameters[i].numel() : 0};
  }
  const Layout layout = Layout::make(specs);
  sums_.resize(parameters.size());
  is_filled_.resize(parameters.size());
  if (layout.arenas().empty()) return;
  memory_ = allocate_zeroed(layout.arenas()[0].size_bytes, parameters[0].device());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!is_summed(parameters[i])) continue;
    sums_[i] = tensor_over(parameters[i], at::kFloat, memory_.data + layout.slots()[i].offset_bytes,
                           memory_.keeper);
  }
}

// The parameter's gradient in its sum's order of elements; undefined where it has none.
at::Tensor GradientArena::take(std::size_t idx, const at::Tensor& parameter) const {
  at::Tensor gradient = parameter.grad();
  if (!gradient.defined()) return {};
  check(gradient, parameter);
  const at::Tensor& sum = sums_[idx];
  if (!same_layout(gradient, sum) || is_lazy_view(gradient)) {
    const c10::AutoGradMode no_grad(false);
    gradient = gradient.new_empty_strided(sum.sizes(), sum.strides()).copy_(gradient);
  }
  return gradient;
}

void GradientArena::ingest_there(std::size_t idx, const at::Tensor& parameter) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor gradient = take(idx, parameter);
  if (!gradient.defined()) return;
  if (is_filled_[idx] == 0) {
    sums_[idx].copy_(gradient);
  } else {
    sums_[idx].add_(gradient);
  }
  is_filled_[idx] = 1;
  parameter.mutable_grad().reset();
}

void GradientArena::ingest(std::size_t idx, const at::Tensor& parameter, HotMeasure& hot,
                           bool measures) {
  const at::Tensor gradient = take(idx, parameter);
  if (!gradient.defined()) return;
  const at::Tensor& sum = sums_[idx];
  const DType dtype = *arena_dtype(gradient.scalar_type());
  const auto* from = static_cast<const std::byte*>(gradient.const_data_ptr());
  auto* to = static_cast<float*>(sum.mutable_data_ptr());
  const bool overwrites = is_filled_[idx] == 0;
  const std::int64_t num_elements = sum.numel();
  const auto run = [&](BlockMeasure* blocks) {
    hot.parallel_for(num_elements)
        .for_ranges(num_norm_blocks(num_elements), 16, [&](std::int64_t begin, std::int64_t end) {
          const std::int64_t first = begin * kNormBlockElements;
          kernels().ingest[static_cast<int>(dtype)](
              from + first * element_bytes(dtype),
              std::min(end * kNormBlockElements, num_elements) - first, overwrites, to + first,
              blocks == nullptr ? nullptr : blocks + begin);
        });
  };
  if (measures) {
    hot.measure_with(idx, sum, [&](std::span<BlockMeasure> blocks) { run(blocks.data()); });
  } else {
    hot.forget(idx);
    run(nullptr);
  }
  is_filled_[idx] = 1;
  parameter.mutable_grad().reset();
}

at::Tensor GradientArena::sum(std::size_t idx) const {
  return is_filled_[idx] != 0 ? sums_[idx] : at::Tensor();
}

void GradientArena::clear() { std::fill(is_filled_.begin(), is_filled_.end(), std::uint8_t{0}); }

}  // namespace tradewind
