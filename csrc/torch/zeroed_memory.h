// Memory for arrays that begin as zeros, on the CPU an arena of our own, on another device torch's:
// its allocator then knows what is taken. Whoever holds the keeper owns it.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "arena/memory.h"

namespace tradewind {

struct ZeroedMemory {
  std::byte* data = nullptr;
  std::shared_ptr<const void> keeper;
};

// Throws Error(kOutOfMemory) on the CPU, and what torch throws elsewhere. Zeros are written on the
// device's current stream. `fork`: of the CPU's memory.
ZeroedMemory allocate_zeroed(std::int64_t num_bytes, c10::Device device,
                             ArenaMemory::Fork fork = ArenaMemory::Fork::kHide);

}  // namespace tradewind
