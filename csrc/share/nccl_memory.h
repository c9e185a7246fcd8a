// Device memory that NCCL can send from and into without a copy, made by NCCL. Owned by this; it
// must outlive what is queued on it. Any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "share/nccl_library.h"

namespace tradewind {

class NcclMemory {
 public:
  // On the calling thread's device, rounded up to what the device maps at once (2 MiB). Throws
  // Error(kOutOfMemory) naming the size, Error(kBadState) where NCCL is too old.
  NcclMemory(std::shared_ptr<const NcclLibrary> library, std::int64_t num_bytes);
  ~NcclMemory() noexcept;
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  std::shared_ptr<const NcclLibrary> library_;
  void* data_ = nullptr;
  int owner_pid_;
};

}  // namespace tradewind
