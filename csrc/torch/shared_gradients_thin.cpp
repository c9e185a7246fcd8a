// Matrices that travel as two thin ones (PowerSGD). Only the thin ones have slots: the left one
// where the parameter would have had its own, the right one before all of these. A view's memory is
// its own.
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "torch/shared_gradients.h"
#include "torch/shared_gradients_impl.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

// As the gradient lies in memory: what is next to each other along the outermost dimension is a row
// (of a linear layer's weight, an output's; of a convolution's, a filter).
LowRankShape thin_shape(const at::Tensor& parameter, std::int64_t wanted_rank) {
  const at::Tensor dense = dense_like(parameter);
  std::int64_t rows = 1, largest_stride = 0;
  for (std::int64_t dim = 0; dim < dense.dim(); ++dim) {
    if (dense.size(dim) > 1 && dense.stride(dim) > largest_stride) {
      largest_stride = dense.stride(dim);
      rows = dense.size(dim);
    }
  }
  return low_rank_shape(rows, rows == 0 ? 0 : dense.numel() / rows, wanted_rank);
}

}  // namespace

std::unique_ptr<LowRankMatrix> SharedGradients::make_thin(std::size_t idx) const {
  if (options_.low_rank == 0) return nullptr;
  const at::Tensor& parameter = parameters_[idx];
  if (parameter.dim() < 2 || parameter.is_complex()) return nullptr;
  const LowRankShape shape = thin_shape(parameter, options_.low_rank);
  if (shape.rank == 0) return nullptr;
  return std::make_unique<LowRankMatrix>(shape, idx);
}

void SharedGradients::make_thin_view(std::size_t idx) {
  const at::Tensor& parameter = parameters_[idx];
  const auto dtype = sums_microbatches_ ? at::kFloat : parameter.scalar_type();
  const ZeroedMemory memory = allocate_zeroed(
      parameter.numel() * static_cast<std::int64_t>(c10::elementSize(dtype)), c10::kCPU);
  views_[idx] = tensor_over(dense_like(parameter), dtype, memory.data, memory.keeper);
}

float* SharedGradients::slot_data(std::int64_t slot_idx) const {
  const Slot& slot = layout_.slots()[static_cast<std::size_t>(slot_idx)];
  return reinterpret_cast<float*>(arena_data_[static_cast<std::size_t>(slot.arena_idx)] +
                                  slot.offset_bytes);
}

void SharedGradients::project(std::size_t idx) {
  float* left = slot_data(slot_of_[idx]);
  const at::Tensor& view = views_[idx];
  if (is_shadow_ || is_nonfinite_[idx] != 0) {
    thin_[idx]->stay_away(is_nonfinite_[idx] == 0, left);
    return;
  }
  thin_[idx]->project(view.const_data_ptr(), *arena_dtype(view.scalar_type()),
                      pool_for(view.numel()), left);
}

void SharedGradients::turn_thin() {
  if (first_slot_ == 0) return;
  const std::scoped_lock lock(mutex_);
  for (std::size_t bucket = 0; bucket < plan_.buckets().size(); ++bucket) {
    const auto& slots = plan_.buckets()[bucket].slots;
    const bool has_left = std::any_of(slots.begin(), slots.end(), [&](std::int64_t slot) {
      return slot >= first_slot_ && thin_[parameter_at(slot)];
    });
    if (!has_left) continue;
    exchange_->wait(static_cast<std::int32_t>(bucket));
    for (const std::int64_t slot : slots) {
      const std::size_t idx = parameter_at(slot);
      if (!thin_[idx]) continue;
      thin_[idx]->turn(slot_data(slot), pool_for(views_[idx].numel()),
                       slot_data(right_slot_of_[idx]));
      count_slot(right_slot_of_[idx]);
    }
  }
}

void SharedGradients::rebuild_thin(double mean_factor) {
  for (const std::size_t idx : parameter_of_) {
    if (!thin_[idx]) continue;
    const at::Tensor& view = views_[idx];
    const DType dtype = *arena_dtype(view.scalar_type());
    if (is_used_anywhere_[idx] == 0) {
      thin_[idx]->keep(dtype, view.const_data_ptr());
      continue;
    }
    thin_[idx]->rebuild(slot_data(right_slot_of_[idx]), mean_factor, pool_for(view.numel()), dtype,
                        view.mutable_data_ptr());
  }
}

std::map<std::string, at::Tensor> SharedGradients::feedback() {
  std::map<std::string, at::Tensor> found;
  const auto add = [&](const std::string& name, std::span<float> values) {
    const auto size = static_cast<std::int64_t>(values.size());
    found.emplace(name, at::from_blob(values.data(), {size}, at::kFloat));
  };
  const std::span<std::vector<float>> errors = exchange_->errors();
  for (std::size_t arena = 0; arena < errors.size(); ++arena) {
    if (!errors[arena].empty()) add("arena " + std::to_string(arena), errors[arena]);
  }
  for (const std::size_t idx : parameter_of_) {
    if (!thin_[idx]) continue;
    add("error of " + names_[idx], thin_[idx]->error());
    add("directions of " + names_[idx], thin_[idx]->directions());
  }
  return found;
}

}  // namespace tradewind
