#include "torch/gradient_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "arena/dtype.h"
#include "torch/slot_tensor.h"

namespace tradewind {

struct GradientHooks::Shared {
  Callback callback;
  std::atomic<bool> is_live{true};
};

class GradientHooks::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::shared_ptr<Shared> shared, std::size_t parameter_idx, at::Tensor parameter)
      : shared_(std::move(shared)),
        parameter_idx_(parameter_idx),
        parameter_(std::move(parameter)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (shared_->is_live.load(std::memory_order_acquire)) {
      shared_->callback(parameter_idx_, parameter_);
    }
    return outputs;
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::size_t parameter_idx_;
  at::Tensor parameter_;
};

struct GradientHooks::Installed {
  // What grad_accumulator() returns: shared_ptr up to torch 2.12, intrusive_ptr from 2.13. Held,
  // because the tensor itself holds its node weakly.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) node;
  std::uintptr_t hook_key = 0;
};

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, Callback callback,
                             bool takes_complex)
    : parameters_(parameters), takes_complex_(takes_complex), shared_(std::make_shared<Shared>()) {
  shared_->callback = std::move(callback);
  installed_.resize(parameters.size());
}

GradientHooks::~GradientHooks() noexcept {
  shared_->is_live.store(false, std::memory_order_release);
  remove();
}

void GradientHooks::install() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.defined()) continue;
    const auto dtype = arena_dtype(parameter.scalar_type());
    if (!parameter.requires_grad() || !dtype) continue;
    if (!is_floating(*dtype) && !(takes_complex_ && is_complex(*dtype))) continue;
    auto node = torch::autograd::impl::grad_accumulator(parameter);
    if (installed_[i].node == node) continue;
    installed_[i].hook_key = node->add_post_hook(std::make_unique<Hook>(shared_, i, parameter));
    installed_[i].node = std::move(node);
  }
}

void GradientHooks::remove() noexcept {
  for (Installed& installed : installed_) {
    if (installed.node) installed.node->del_post_hook(installed.hook_key);
    installed = Installed{};
  }
}

bool GradientHooks::may_run() const {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) return true;  // a backward() of everything
  return std::any_of(installed_.begin(), installed_.end(), [&](const Installed& installed) {
    if (!installed.node) return false;
    const auto found = executed->find(installed.node.get());
    return found != executed->end() && found->second.needed_;
  });
}

}  // namespace tradewind
