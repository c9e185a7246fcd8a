#include "torch/pinned_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tradewind {

PinnedBuffer::PinnedBuffer(std::int64_t num_bytes, c10::Device device)
    : device_(device),
      bytes_(at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(
                                        device.is_cpu() ? false : true))) {}

void PinnedBuffer::copy_to(const at::Tensor& there) {
  at::Tensor(there).copy_(bytes_.narrow(0, 0, there.numel()), /*non_blocking=*/true);
}

void PinnedBuffer::copy_from(const at::Tensor& there) {
  bytes_.narrow(0, 0, there.numel()).copy_(there, /*non_blocking=*/true);
}

void PinnedBuffer::mark() {
  if (device_.is_cpu()) return;
  if (!event_) event_.emplace(device_.type());
  event_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

bool PinnedBuffer::is_over() const { return !event_ || event_->query(); }

void PinnedBuffer::wait() const {
  if (event_) event_->synchronize();
}

std::shared_ptr<PinnedBuffer> PinnedPool::take(std::int64_t num_bytes) {
  for (const auto& buffer : buffers_) {
    if (buffer.use_count() == 1 && buffer->size_bytes() >= num_bytes && buffer->is_over()) {
      return buffer;
    }
  }
  return buffers_.emplace_back(std::make_shared<PinnedBuffer>(num_bytes, device_));
}

}  // namespace tradewind
