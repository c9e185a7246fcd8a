#include "torch/hot_measure.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

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

bool is_measurable(const at::Tensor& gradient, const at::Tensor& parameter) {
  const auto dtype = arena_dtype(gradient.scalar_type());
  return gradient.layout() == at::kStrided && gradient.device().is_cpu() && dtype &&
         is_floating(*dtype) && is_dense(parameter) && same_layout(gradient, parameter) &&
         !gradient._is_zerotensor();
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

struct HotMeasure::Records {
  std::thread::id step_thread = std::this_thread::get_id();
  std::mutex mutex;  // against two backwards on two threads
  std::vector<Record> all;
};

HotMeasure::HotMeasure(std::size_t num_parameters) : records_(std::make_unique<Records>()) {
  (void)kernels();  // so that a bad TRADEWIND_ISA is told here, not from a hook
  records_->all.resize(num_parameters);
}

HotMeasure::~HotMeasure() noexcept = default;

void HotMeasure::take(std::size_t idx, const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined() || !is_measurable(gradient, parameter)) {
    forget(idx);
    return;
  }
  const DType dtype = *arena_dtype(gradient.scalar_type());
  const std::int64_t num_elements = gradient.numel();
  const auto* data = static_cast<const std::byte*>(gradient.const_data_ptr());
  measure_with(idx, gradient, [&](std::span<BlockMeasure> blocks) {
    parallel_for(num_elements)
        .for_ranges(num_norm_blocks(num_elements), 16, [&](std::int64_t begin, std::int64_t end) {
          const std::int64_t first = begin * kNormBlockElements;
          kernels().measure[static_cast<int>(dtype)](
              data + first * element_bytes(dtype),
              std::min(end * kNormBlockElements, num_elements) - first, blocks.data() + begin);
        });
  });
}

void HotMeasure::measure_with(std::size_t idx, const at::Tensor& gradient,
                              const std::function<void(std::span<BlockMeasure>)>& measure) {
  const std::scoped_lock lock(records_->mutex);
  Record& record = records_->all[idx];
  record.gradient.reset();
  record.blocks.resize(static_cast<std::size_t>(num_norm_blocks(gradient.numel())));
  measure(record.blocks);
  record.gradient.emplace(gradient.getIntrusivePtr());
  record.data = gradient.const_data_ptr();
  record.version = version_of(gradient);
}

void HotMeasure::forget(std::size_t idx) {
  const std::scoped_lock lock(records_->mutex);
  records_->all[idx].gradient.reset();
}

std::span<const BlockMeasure> HotMeasure::blocks_for(std::size_t idx,
                                                     const at::Tensor& gradient) const {
  const Record& record = records_->all[idx];
  const bool is_same = record.gradient.has_value() &&
                       record.gradient->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
                       record.data == gradient.const_data_ptr() &&
                       record.version == version_of(gradient);
  return is_same ? std::span<const BlockMeasure>(record.blocks) : std::span<const BlockMeasure>();
}

// torch's pool only from the step's own thread: each other caller would get its own OpenMP team.
const Parallel& HotMeasure::parallel_for(std::int64_t num_elements) const {
  const bool is_parallel =
      num_elements >= kParallelElements && std::this_thread::get_id() == records_->step_thread;
  return is_parallel ? kTorchParallel : kSerial;
}

}  // namespace tradewind
