// What the units of SharedGradients share.
#pragma once

#include <cstdint>

#include "base/parallel.h"
#include "torch/parallel.h"

namespace tradewind {

// Measures have one only where they are wanted.
enum SharedChannel : std::int32_t { kFactsChannel, kBuffersChannel, kMeasuresChannel };

// Below, values fit the caches of this core and waking others would cost more.
inline constexpr std::int64_t kParallelElements = 256 * 1024;

inline const Parallel& pool_for(std::int64_t num_elements) {
  return num_elements >= kParallelElements ? kTorchParallel : kSerial;
}

}  // namespace tradewind
