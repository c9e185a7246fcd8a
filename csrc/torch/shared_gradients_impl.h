// What the units of SharedGradients share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/parallel.h"
#include "torch/parallel.h"
#include "torch/slot_tensor.h"

namespace tradewind {

// Measures have one only where they are wanted.
enum SharedChannel : std::int32_t { kFactsChannel, kBuffersChannel, kMeasuresChannel };

// Below, values fit the caches of this core and waking others would cost more.
inline constexpr std::int64_t kParallelElements = 256 * 1024;

inline const Parallel& pool_for(std::int64_t num_elements) {
  return num_elements >= kParallelElements ? kTorchParallel : kSerial;
}

// Memory in which the gradient of a parameter can lie: its order of elements, without gaps.
inline at::Tensor dense_like(const at::Tensor& parameter) {
  return is_dense(parameter) ? parameter.detach()
                             : parameter.detach().clone(at::MemoryFormat::Contiguous);
}

}  // namespace tradewind
