#include "torch/hot_measure.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "arena/layout.h"
#include "step/kernels.h"
#include "torch/parallel.h"
#include "torch/slot_tensor.h"

namespace tradewind {

namespace {

// From here on waking torch's pool pays; below, the gradient fits the caches of this core.
constexpr std::int64_t kParallelElements = 256 * 1024;

struct Record {
  // Weak, so that the address cannot be reused by another tensor while we compare with it.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> gradient;
  const void* data = nullptr;
  std::uint32_t version = 0;
  std::vector<BlockMeasure> blocks;
};

}  // namespace

struct HotMeasure::Shared {
  std::atomic<bool> enabled{true};
  std::thread::id step_thread = std::this_thread::get_id();
  std::mutex mutex;  // guards records against two backwards on two threads
  std::vector<Record> records;

  void take(std::size_t slot_idx, const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    Record& record = records[slot_idx];
    const std::scoped_lock lock(mutex);
    record.gradient.reset();
    if (!gradient.defined()) return;
    const auto dtype = arena_dtype(gradient.scalar_type());
    if (gradient.layout() != at::kStrided || !gradient.device().is_cpu() || !dtype ||
        !is_floating(*dtype) || !is_dense(parameter) || !same_layout(gradient, parameter)) {
      return;
    }
    measure(gradient, record.blocks);
    record.gradient.emplace(gradient.getIntrusivePtr());
    record.data = gradient.const_data_ptr();
    record.version = gradient.unsafeGetTensorImpl()->version_counter().current_version();
  }

  void measure(const at::Tensor& gradient, std::vector<BlockMeasure>& blocks) const {
    const DType dtype = *arena_dtype(gradient.scalar_type());
    const std::int64_t num_elements = gradient.numel();
    blocks.resize(static_cast<std::size_t>(num_norm_blocks(num_elements)));
    const MeasureKernel kernel = kernels().measure[static_cast<int>(dtype)];
    const auto* data = static_cast<const std::byte*>(gradient.const_data_ptr());
    // parallel_for only from the step's own thread: each other caller would get its own OpenMP
    // team.
    const bool is_parallel =
        num_elements >= kParallelElements && std::this_thread::get_id() == step_thread;
    (is_parallel ? kTorchParallel : kSerial)
        .for_ranges(num_norm_blocks(num_elements), 16, [&](std::int64_t begin, std::int64_t end) {
          const std::int64_t first = begin * kNormBlockElements;
          kernel(data + first * element_bytes(dtype),
                 std::min(end * kNormBlockElements, num_elements) - first, blocks.data() + begin);
        });
  }
};

class HotMeasure::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::shared_ptr<Shared> shared, std::size_t slot_idx, at::Tensor parameter)
      : shared_(std::move(shared)), slot_idx_(slot_idx), parameter_(std::move(parameter)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (shared_->enabled.load(std::memory_order_relaxed)) shared_->take(slot_idx_, parameter_);
    return outputs;
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::size_t slot_idx_;
  at::Tensor parameter_;
};

struct HotMeasure::Installed {
  // What grad_accumulator() returns: shared_ptr up to torch 2.12, intrusive_ptr from 2.13. Held,
  // because the tensor itself holds its node weakly.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) node;
  std::uintptr_t hook_key = 0;
};

HotMeasure::HotMeasure(const std::vector<at::Tensor>& parameters)
    : parameters_(parameters), shared_(std::make_shared<Shared>()) {
  shared_->records.resize(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    if (parameter.device().is_cpu() && parameter.is_floating_point()) (void)kernels();
  }
  installed_.resize(parameters.size());
}

HotMeasure::~HotMeasure() noexcept {
  set_enabled(false);
  remove();
}

void HotMeasure::install() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    const auto dtype = arena_dtype(parameter.scalar_type());
    if (!parameter.requires_grad() || !parameter.device().is_cpu() || !dtype ||
        !is_floating(*dtype)) {
      continue;
    }
    auto node = torch::autograd::impl::grad_accumulator(parameter);
    if (installed_[i].node == node) continue;
    installed_[i].hook_key = node->add_post_hook(std::make_unique<Hook>(shared_, i, parameter));
    installed_[i].node = std::move(node);
  }
}

void HotMeasure::remove() noexcept {
  for (Installed& installed : installed_) {
    if (installed.node) installed.node->del_post_hook(installed.hook_key);
    installed = Installed{};
  }
}

void HotMeasure::set_enabled(bool enabled) noexcept {
  shared_->enabled.store(enabled, std::memory_order_relaxed);
}

std::span<const BlockMeasure> HotMeasure::blocks_for(std::int64_t slot_idx,
                                                     const at::Tensor& gradient) const {
  const Record& record = shared_->records[static_cast<std::size_t>(slot_idx)];
  const bool is_same =
      record.gradient.has_value() &&
      record.gradient->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
      record.data == gradient.const_data_ptr() &&
      record.version == gradient.unsafeGetTensorImpl()->version_counter().current_version();
  return is_same ? std::span<const BlockMeasure>(record.blocks) : std::span<const BlockMeasure>();
}

}  // namespace tradewind
