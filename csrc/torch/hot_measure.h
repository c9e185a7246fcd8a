// Measures each gradient while it is still in cache: a C++ hook behind every parameter's
// AccumulateGrad node. A sum counts only if, at the step, gradient object, memory and version are
// the ones that were measured; otherwise that gradient is measured again. Hooks may fire on any
// autograd thread; everything else belongs to the thread that runs the step. Hooks outlive the
// HotMeasure where a graph still holds their node, and then do nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace tradewind {

struct BlockMeasure;

class HotMeasure {
 public:
  explicit HotMeasure(const std::vector<at::Tensor>& parameters);
  ~HotMeasure() noexcept;
  HotMeasure(const HotMeasure&) = delete;
  HotMeasure& operator=(const HotMeasure&) = delete;

  // Hooks the parameters that require a gradient and have no hook yet. Once requires_grad changed,
  // or a parameter's dtype (which drops its AccumulateGrad node), call it again.
  void install();
  // Removes all hooks; install() brings them back.
  void remove() noexcept;
  // Off: hooks return at once (the microbatches before the last one of an accumulation).
  void set_enabled(bool enabled) noexcept;

  // The blocks of this very gradient, or an empty span. Valid until the next backward.
  [[nodiscard]] std::span<const BlockMeasure> blocks_for(std::int64_t slot_idx,
                                                         const at::Tensor& gradient) const;

 private:
  struct Shared;
  class Hook;
  struct Installed;

  std::vector<at::Tensor> parameters_;
  std::shared_ptr<Shared> shared_;
  std::vector<Installed> installed_;
};

}  // namespace tradewind
