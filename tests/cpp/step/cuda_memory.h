// Bytes between guards, at an alignment that a copy keeps, and sample values in any format.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/split_mix.h"
#include "step/format.h"

namespace tradewind {

// Bytes that begin `shift` bytes behind a 64-byte boundary, between guards. Under the address
// sanitizer the allocation ends where they do, so that it sees reads beyond them.
class GuardedBytes {
 public:
  GuardedBytes() = default;
  GuardedBytes(std::size_t num_bytes, std::size_t shift)
      : begin_(kGuardBytes + shift), num_bytes_(num_bytes) {
    allocate();
    std::memset(memory_.get(), 0xA5, size());
    if (num_bytes > 0) std::memset(data(), 0, num_bytes);
  }
  GuardedBytes(const GuardedBytes& other) : begin_(other.begin_), num_bytes_(other.num_bytes_) {
    if (other.memory_ == nullptr) return;
    allocate();
    std::memcpy(memory_.get(), other.memory_.get(), size());
  }
  GuardedBytes(GuardedBytes&&) = default;
  GuardedBytes& operator=(GuardedBytes other) {
    memory_ = std::move(other.memory_);
    begin_ = other.begin_;
    num_bytes_ = other.num_bytes_;
    return *this;
  }

  // Null where it was never given a size, like an array that a slot does not have.
  std::byte* data() { return memory_ == nullptr ? nullptr : memory_.get() + begin_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  // The first byte that differs, counted from the array's beginning; kSame where none does.
  static constexpr std::int64_t kSame = INT64_MIN;
  [[nodiscard]] std::int64_t first_difference(const GuardedBytes& other) const {
    for (std::size_t i = 0; i < std::max(size(), other.size()); ++i) {
      if (i >= size() || i >= other.size() || memory_.get()[i] != other.memory_.get()[i]) {
        return static_cast<std::int64_t>(i) - static_cast<std::int64_t>(begin_);
      }
    }
    return kSame;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kEndGuardBytes = 0;
#else
  static constexpr std::size_t kEndGuardBytes = 64;
#endif
  static constexpr std::size_t kGuardBytes = 64;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  [[nodiscard]] std::size_t size() const {
    return memory_ == nullptr ? 0 : begin_ + num_bytes_ + kEndGuardBytes;
  }
  void allocate() {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, begin_ + num_bytes_ + kEndGuardBytes) != 0) std::abort();
    memory_.reset(static_cast<std::byte*>(memory));
  }

  std::unique_ptr<std::byte, Free> memory_;
  std::size_t begin_ = 0;
  std::size_t num_bytes_ = 0;
};

// Of ordinary size mostly, some zero, subnormal, tiny or large; nothing overflows from them.
inline double sample_of(SplitMix& random, Format format) {
  const double sample = random.uniform();
  switch (random.below(16)) {
    case 0: return sample < 0.0 ? -0.0 : 0.0;
    case 1: return sample * (format == Format::kFloat64 ? 1e-310 : 1e-39);
    case 2: return sample * 1e-20;
    case 3: return sample * 300.0;
    case 4: return sample * 1e-3;
    default: return sample;
  }
}

inline void write_element(Format format, double value, std::size_t i, std::byte* out) {
  const auto narrow = static_cast<float>(value);
  const auto put = [&](auto stored) {
    std::memcpy(out + i * sizeof(stored), &stored, sizeof(stored));
  };
  switch (format) {
    case Format::kFloat32: put(narrow); break;
    case Format::kFloat64: put(value); break;
    case Format::kFloat16: put(static_cast<_Float16>(narrow)); break;
    default: put(to_bfloat16(narrow)); break;
  }
}

inline GuardedBytes sample_bytes(Format format, std::size_t count, std::size_t shift,
                                 std::uint64_t seed) {
  const auto bytes = static_cast<std::size_t>(format_bytes(format));
  GuardedBytes array(count * bytes, shift * bytes);
  SplitMix random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    write_element(format, sample_of(random, format), i, array.data());
  }
  return array;
}

// A state: within [-1, 1), or from 1 up where it is never negative, so that a variance less a
// squared mean stays positive.
inline GuardedBytes sample_state(Format format, std::size_t count, std::size_t shift,
                                 bool is_positive, std::uint64_t seed) {
  const auto bytes = static_cast<std::size_t>(format_bytes(format));
  GuardedBytes array(count * bytes, shift * bytes);
  SplitMix random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    if (is_blockwise(format)) {
      const std::int64_t code = is_positive ? 248 + random.below(8) : random.below(256);
      array.data()[i] = static_cast<std::byte>(code);
    } else {
      const double sample = random.below(8) == 0 ? random.uniform() * 1e-20 : random.uniform();
      write_element(format, is_positive ? 1.0 + std::abs(sample) : sample, i, array.data());
    }
  }
  return array;
}

// With those codes: from 1 up, or at most 1.
inline GuardedBytes sample_exponents(std::size_t count, std::size_t shift, bool is_positive,
                                     std::uint64_t seed) {
  GuardedBytes array(count, shift);
  SplitMix random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t exponent = is_positive ? 96 + random.below(4) : 80 + random.below(31);
    array.data()[i] = static_cast<std::byte>(exponent);
  }
  return array;
}

}  // namespace tradewind
