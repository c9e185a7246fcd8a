// Elements that end where unreadable memory begins, so that a read or write behind them ends the
// test, with guards in front that show a write there. Aligned to nothing but the element, and the
// same for as many elements of any type of that size.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace tradewind {

template <class T>
class FencedArray {
 public:
  explicit FencedArray(std::size_t num_elements) : num_elements_(num_elements) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t num_bytes = num_elements * sizeof(T);
    open_bytes_ = (num_bytes + kGuardBytes + page - 1) / page * page;
    all_bytes_ = open_bytes_ + page;
    void* memory =
        mmap(nullptr, all_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<std::byte*>(memory);
    if (mprotect(memory_ + open_bytes_, page, PROT_NONE) != 0) std::abort();
    std::memset(memory_, kGuard, open_bytes_);  // what is not written shows too
  }
  explicit FencedArray(const std::vector<T>& values) : FencedArray(values.size()) {
    std::copy(values.begin(), values.end(), data());
  }
  FencedArray(const FencedArray&) = delete;
  FencedArray& operator=(const FencedArray&) = delete;
  FencedArray(FencedArray&& other) noexcept
      : num_elements_(other.num_elements_),
        open_bytes_(other.open_bytes_),
        all_bytes_(other.all_bytes_),
        memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  ~FencedArray() {
    if (memory_ != nullptr) munmap(memory_, all_bytes_);
  }

  T* data() { return reinterpret_cast<T*>(memory_ + open_bytes_ - num_elements_ * sizeof(T)); }
  [[nodiscard]] std::vector<T> values() { return {data(), data() + num_elements_}; }
  [[nodiscard]] bool guards_are_intact() {
    return std::all_of(memory_, reinterpret_cast<std::byte*>(data()),
                       [](std::byte value) { return value == std::byte{kGuard}; });
  }

 private:
  static constexpr unsigned char kGuard = 0xA5;
  static constexpr std::size_t kGuardBytes = 128;  // two of the widest vectors

  std::size_t num_elements_;
  std::size_t open_bytes_ = 0;
  std::size_t all_bytes_ = 0;
  std::byte* memory_ = nullptr;
};

}  // namespace tradewind
