// Elements in memory that is aligned to them and to nothing more, between guards that show a write
// beyond either end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tradewind {

template <class Stored>
class GuardedArray {
 public:
  // The first element lies `shift` elements behind a 64-byte boundary.
  GuardedArray(const Stored* values, std::size_t num_elements, std::size_t shift)
      : num_elements_(num_elements),
        bytes_(2 * kGuardBytes + 64 + (shift + num_elements) * sizeof(Stored), kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data()) + kGuardBytes;
    offset_ = kGuardBytes + (64 - address % 64) % 64 + shift * sizeof(Stored);
    if (num_elements > 0) std::memcpy(data(), values, num_elements * sizeof(Stored));
  }
  GuardedArray(GuardedArray&&) = default;  // a vector's memory moves with it

  Stored* data() { return reinterpret_cast<Stored*>(bytes_.data() + offset_); }

  [[nodiscard]] bool guards_are_intact() const {
    const auto is_guard = [](std::byte value) { return value == kGuard; };
    const auto begin = bytes_.begin() + static_cast<std::ptrdiff_t>(offset_);
    const auto end = begin + static_cast<std::ptrdiff_t>(num_elements_ * sizeof(Stored));
    return std::all_of(bytes_.begin(), begin, is_guard) && std::all_of(end, bytes_.end(), is_guard);
  }

 private:
  static constexpr std::byte kGuard{0xA5};
  static constexpr std::size_t kGuardBytes = 128;  // two of the widest vectors

  std::size_t num_elements_;
  std::vector<std::byte> bytes_;
  std::size_t offset_ = 0;
};

}  // namespace tradewind
