// Measures gradients while they are hot in cache, by parameter index, and remembers which gradient
// each sum is of. A sum counts only if, at the step, gradient object, memory and version are the
// ones that were measured; otherwise that gradient is measured again. take() and measure_with() may
// run on any autograd thread; the rest belongs to the thread that runs the step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/parallel.h"

namespace tradewind {

struct BlockMeasure;

class HotMeasure {
 public:
  // Made on the thread that runs the step: only there are large gradients measured in parallel.
  explicit HotMeasure(std::size_t num_parameters);
  ~HotMeasure() noexcept;
  HotMeasure(const HotMeasure&) = delete;
  HotMeasure& operator=(const HotMeasure&) = delete;

  // Measures the parameter's gradient; forgets it where it cannot be measured here.
  void take(std::size_t idx, const at::Tensor& parameter);
  // `measure` fills the blocks of `gradient`, in passing.
  void measure_with(std::size_t idx, const at::Tensor& gradient,
                    const std::function<void(std::span<BlockMeasure>)>& measure);
  void forget(std::size_t idx);

  // The blocks of this very gradient, or an empty span. Valid until the next backward.
  [[nodiscard]] std::span<const BlockMeasure> blocks_for(std::size_t idx,
                                                         const at::Tensor& gradient) const;
  // What a pass over this many elements may use on the calling thread.
  [[nodiscard]] const Parallel& parallel_for(std::int64_t num_elements) const;

 private:
  struct Records;
  std::unique_ptr<Records> records_;
};

}  // namespace tradewind
