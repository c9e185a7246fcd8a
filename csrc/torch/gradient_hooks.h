// Hooks on parameters that run in backward as soon as `.grad` of one has been accumulated. They may
// fire on any autograd thread, several times in one backward (reentrant checkpointing), and outlive
// this object where a graph still holds their node; they then do nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace tradewind {

class GradientHooks {
 public:
  using Callback = std::function<void(std::size_t parameter_idx, const at::Tensor& parameter)>;

  // Parameters that are undefined tensors get no hook, nor do complex ones unless `takes_complex`.
  GradientHooks(const std::vector<at::Tensor>& parameters, Callback callback,
                bool takes_complex = false);
  ~GradientHooks() noexcept;
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Hooks the parameters that require a gradient and have no hook yet. Once requires_grad changed,
  // or a parameter's dtype (which drops its AccumulateGrad node), call it again.
  void install();
  // Removes all hooks; install() brings them back.
  void remove() noexcept;
  // In a hook of any tensor: whether the backward that runs may reach a parameter. autograd.grad
  // and backward(inputs=...) accumulate into what they name alone.
  [[nodiscard]] bool may_run() const;

 private:
  struct Shared;
  class Hook;
  struct Installed;

  std::vector<at::Tensor> parameters_;
  bool takes_complex_;
  std::shared_ptr<Shared> shared_;
  std::vector<Installed> installed_;
};

}  // namespace tradewind
