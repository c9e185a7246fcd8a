#include "torch/zeroed_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace tradewind {

ZeroedMemory allocate_zeroed(std::int64_t num_bytes, c10::Device device, ArenaMemory::Fork fork) {
  if (device.is_cpu()) {
    auto memory = std::make_shared<ArenaMemory>(num_bytes, fork);
    return {memory->data(), memory};
  }
  auto memory = std::make_shared<at::Tensor>(
      at::zeros({num_bytes}, at::TensorOptions().dtype(at::kByte).device(device)));
  return {static_cast<std::byte*>(memory->mutable_data_ptr()), memory};
}

}  // namespace tradewind
