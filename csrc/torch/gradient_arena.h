// Float32 sums of 16-bit gradients over the microbatches of an accumulation, in one arena in layout
// order. A gradient is taken as soon as backward has made it and its own memory freed. Different
// parameters may be ingested on different threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "torch/hot_measure.h"
#include "torch/zeroed_memory.h"

namespace tradewind {

class GradientArena {
 public:
  // Has a slot, on their common device, for each dense parameter of bfloat16 or float16.
  explicit GradientArena(const std::vector<at::Tensor>& parameters);

  [[nodiscard]] bool holds(std::size_t idx) const { return sums_[idx].defined(); }
  // Adds the parameter's gradient, if it has one, and drops it. On the CPU, where `measures`, the
  // sum is measured in passing.
  void ingest(std::size_t idx, const at::Tensor& parameter, HotMeasure& hot, bool measures);
  // The same on a device, on its current stream.
  void ingest_there(std::size_t idx, const at::Tensor& parameter);
  // The sum of what was ingested since clear(); undefined where nothing was.
  [[nodiscard]] at::Tensor sum(std::size_t idx) const;
  void clear();

 private:
  [[nodiscard]] at::Tensor take(std::size_t idx, const at::Tensor& parameter) const;

  ZeroedMemory memory_;
  std::vector<at::Tensor> sums_;         // undefined where a parameter has no slot
  std::vector<std::uint8_t> is_filled_;  // bytes, as neighbours may be written by two threads
};

}  // namespace tradewind
