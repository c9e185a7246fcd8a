// One arena's memory: anonymous pages, zero until touched, on huge pages where the system grants
// them. The owner is whoever holds the ArenaMemory; tensors over slots hold it by shared_ptr. A
// forked child never unmaps it, and with Fork::kHide cannot see it. Not copied, not moved.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace tradewind {

class ArenaMemory {
 public:
  enum class Fork : std::uint8_t {
    kShare,  // parameters: readable (copy on write) in DataLoader's workers
    kHide,   // optimizer state, gradients, masters: MADV_DONTFORK, so fork copies no page tables
  };

  // Throws Error(kOutOfMemory) naming the size. A size of zero maps one page.
  explicit ArenaMemory(std::int64_t size_bytes, Fork fork);
  ~ArenaMemory() noexcept;
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t size_bytes_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  pid_t owner_pid_ = 0;
};

}  // namespace tradewind
