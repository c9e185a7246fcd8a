// Memory of one rank that the other ranks of its host map too: a file without a name (memfd), so
// nothing is left behind and /dev/shm has no part in it. Its pages are there from the start and its
// size is sealed, so that neither a full machine nor a neighbour's death makes an access fail. Each
// process owns its own mapping and unmaps it; a forked child neither sees nor unmaps it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace tradewind {

class HostMemory {
 public:
  // Zeros. Throws Error(kOutOfMemory) naming the size; Error(kBadState) where the system has no
  // such memory (it is Linux's).
  explicit HostMemory(std::int64_t size_bytes);
  // Maps what another rank made; takes the file descriptor, and closes it. Throws Error(kBadValue)
  // for a file of another size, or one whose owner could take it away.
  HostMemory(int file, std::int64_t size_bytes);
  ~HostMemory() noexcept;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }

  // What neighbours map; -1 once closed, which they should be as soon as all have it.
  [[nodiscard]] int file() const noexcept { return file_; }
  void close_file() noexcept;

 private:
  void map();

  std::byte* data_ = nullptr;
  std::int64_t size_bytes_ = 0;
  int file_ = -1;
  pid_t owner_pid_ = 0;
};

}  // namespace tradewind
