// Float32 sums of 16-bit gradients over the microbatches of an accumulation, in one arena in layout
// order. A gradient is taken as soon as backward has made it and its own memory freed. Different
// parameters may be ingested on different threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "arena/memory.h"
#include "torch/hot_measure.h"

namespace tradewind {

class GradientArena {
 public:
  // Has a slot for each dense parameter of bfloat16 or float16 on the CPU.
  explicit GradientArena(const std::vector<at::Tensor>& parameters);

  [[nodiscard]] bool holds(std::size_t idx) const { return sums_[idx].defined(); }
  // Adds the parameter's gradient, if it has one, and drops it. Where `measures`, the sum is
  // measured in passing.
  void ingest(std::size_t idx, const at::Tensor& parameter, HotMeasure& hot, bool measures);
  // The sum of what was ingested since clear(); undefined where nothing was.
  [[nodiscard]] at::Tensor sum(std::size_t idx) const;
  void clear();

 private:
  std::shared_ptr<ArenaMemory> memory_;
  std::vector<at::Tensor> sums_;         // undefined where a parameter has no slot
  std::vector<std::uint8_t> is_filled_;  // bytes, as neighbours may be written by two threads
};

}  // namespace tradewind
