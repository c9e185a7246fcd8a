#include "share/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace tradewind {

#ifdef __linux__
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail_size(std::int64_t size_bytes, int error) {
  fail(ErrorKind::kOutOfMemory, "host memory: the system refused ", size_bytes,
       " bytes: ", std::strerror(error),
       "; use strategy=\"allreduce\", a smaller model or a machine with more memory");
}

// What the machine can give without taking it from somebody. fallocate() does not ask: it takes all
// there is, and then the system ends processes, anyone's.
std::int64_t available_bytes() {
  std::ifstream info("/proc/meminfo");
  std::string name, unit;
  std::int64_t kibibytes = 0;
  while (info >> name >> kibibytes && std::getline(info, unit)) {
    if (name == "MemAvailable:") return kibibytes * 1024;
  }
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace

HostMemory::HostMemory(std::int64_t size_bytes) : size_bytes_(size_bytes), owner_pid_(getpid()) {
  if (size_bytes <= 0) {
    fail(ErrorKind::kBadValue, "host memory: expected a positive size, got ", size_bytes);
  }
  if (size_bytes > available_bytes()) fail_size(size_bytes, ENOMEM);
  file_ = memfd_create("tradewind", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file_ < 0) {
    fail(ErrorKind::kBadState, "host memory: memfd_create failed: ", std::strerror(errno),
         "; use strategy=\"allreduce\"");
  }
  // fallocate, as a page that cannot be had at its first touch would end the process (SIGBUS).
  const bool is_made = ftruncate(file_, size_bytes) == 0 && fallocate(file_, 0, 0, size_bytes) == 0;
  if (!is_made || fcntl(file_, F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    close_file();
    fail_size(size_bytes, error);
  }
  map();
}

HostMemory::HostMemory(int file, std::int64_t size_bytes)
    : size_bytes_(size_bytes), file_(file), owner_pid_(getpid()) {
  struct stat found{};
  const bool is_found = fstat(file_, &found) == 0;
  const int seals = fcntl(file_, F_GET_SEALS);
  if (!is_found || found.st_size != size_bytes || seals < 0 || (seals & kSeals) != kSeals) {
    close_file();
    fail(ErrorKind::kBadValue, "host memory: expected a neighbour's file of ", size_bytes,
         " bytes, sealed at this size, got ", is_found ? found.st_size : 0, " bytes and seals ",
         seals);
  }
  map();
  close_file();
}

void HostMemory::map() {
  const auto size = static_cast<std::size_t>(size_bytes_);
  void* mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapping == MAP_FAILED) {
    const int error = errno;
    close_file();
    fail_size(size_bytes_, error);
  }
  data_ = static_cast<std::byte*>(mapping);
  (void)madvise(mapping, size, MADV_DONTFORK);
  // Advice, which few systems follow for such memory.
  (void)madvise(mapping, size, MADV_HUGEPAGE);
}
#else
HostMemory::HostMemory(std::int64_t /*size_bytes*/) {
  fail(ErrorKind::kBadState,
       "host memory: expected Linux, whose memory without a name (memfd) it is made of; use "
       "strategy=\"allreduce\"");
}
HostMemory::HostMemory(int file, std::int64_t size_bytes) : HostMemory(size_bytes) { file_ = file; }
void HostMemory::map() {}
#endif

HostMemory::~HostMemory() noexcept {
  close_file();
  if (data_ != nullptr && owner_pid_ == getpid()) {
    (void)munmap(data_, static_cast<std::size_t>(size_bytes_));
  }
}

void HostMemory::close_file() noexcept {
  if (file_ >= 0) (void)close(std::exchange(file_, -1));
}

}  // namespace tradewind
