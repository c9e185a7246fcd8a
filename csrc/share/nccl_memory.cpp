#include "share/nccl_memory.h"

#include <unistd.h>

#include <utility>

#include "base/error.h"

namespace tradewind {

NcclMemory::NcclMemory(std::shared_ptr<const NcclLibrary> library, std::int64_t num_bytes)
    : library_(std::move(library)), owner_pid_(getpid()) {
  library_->require(library_->has_allocation(), "memory made by NCCL", "2.19");
  const nccl::Result result = library_->mem_alloc(&data_, static_cast<std::size_t>(num_bytes));
  if (result != nccl::kSuccess) {
    fail(ErrorKind::kOutOfMemory, "memory made by NCCL: expected ", num_bytes, " bytes, got ",
         library_->text_of(result),
         "; free some of the device's memory, or see that it works: nvidia-smi");
  }
}

NcclMemory::~NcclMemory() noexcept {
  if (getpid() == owner_pid_) library_->mem_free(data_);
}

}  // namespace tradewind
