#include "arena/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace tradewind {
namespace {

constexpr std::size_t kHugePageBytes = 2U << 20U;
constexpr std::size_t kPageBytes = 4096;

std::size_t round_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

ArenaMemory::ArenaMemory(std::int64_t size_bytes, Fork fork)
    : size_bytes_(size_bytes), owner_pid_(getpid()) {
  if (size_bytes < 0) {
    fail(ErrorKind::kBadValue, "arena: expected a size of zero or more bytes, got ", size_bytes);
  }
  const auto wanted_bytes = static_cast<std::size_t>(size_bytes == 0 ? 1 : size_bytes);
  const bool is_large = wanted_bytes >= kHugePageBytes;
  // A large arena starts at a huge-page boundary, so that all of it can be backed by huge pages.
  const std::size_t alignment = is_large ? kHugePageBytes : kPageBytes;
  mapping_bytes_ = round_up(wanted_bytes, kPageBytes) + (is_large ? kHugePageBytes : 0);
  mapping_ =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    const int error = errno;
    fail(ErrorKind::kOutOfMemory, "arena: the system refused ", size_bytes,
         " bytes: ", std::strerror(error), "; use a smaller model or a machine with more memory");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = static_cast<std::byte*>(mapping_) + (round_up(address, alignment) - address);
  // Both are advice: an arena works without, only slower to touch or to fork.
#ifdef MADV_HUGEPAGE
  if (is_large) (void)madvise(data_, wanted_bytes, MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTFORK
  if (fork == Fork::kHide) (void)madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
#else
  (void)fork;
#endif
}

ArenaMemory::~ArenaMemory() noexcept {
  if (mapping_ != nullptr && owner_pid_ == getpid()) (void)munmap(mapping_, mapping_bytes_);
}

}  // namespace tradewind
