// An array far larger than memory: one small piece of memory stands at every place of it but the
// last, which has memory of its own. What is written to the piece shows at all of its places.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace tradewind {

class RepeatedMapping {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

  // num_pieces times the same piece, then tail_bytes.
  RepeatedMapping(std::size_t num_pieces, std::size_t tail_bytes)
      : size_(num_pieces * kPieceBytes + tail_bytes), tail_(num_pieces * kPieceBytes) {
    void* reserved =
        mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) throw std::runtime_error("RepeatedMapping: no address space");
    base_ = static_cast<std::byte*>(reserved);
    const int piece = memfd_create("piece", 0);
    bool is_mapped = piece >= 0 && ftruncate(piece, kPieceBytes) == 0;
    for (std::size_t i = 0; i < num_pieces; ++i) {
      is_mapped = is_mapped && map(i * kPieceBytes, kPieceBytes, MAP_SHARED, piece);
    }
    is_mapped = is_mapped && map(tail_, tail_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (piece >= 0) close(piece);
    if (is_mapped) return;
    munmap(base_, size_);
    throw std::runtime_error("RepeatedMapping: memory cannot be mapped repeatedly");
  }
  ~RepeatedMapping() { munmap(base_, size_); }
  RepeatedMapping(const RepeatedMapping&) = delete;
  RepeatedMapping& operator=(const RepeatedMapping&) = delete;

  template <class T>
  T* data() {
    return reinterpret_cast<T*>(base_);
  }
  template <class T>
  T* tail() {
    return reinterpret_cast<T*>(base_ + tail_);
  }
  template <class T>
  void fill(T value) {
    for (std::size_t i = 0; i < kPieceBytes / sizeof(T); ++i) data<T>()[i] = value;
    for (std::size_t i = 0; i < (size_ - tail_) / sizeof(T); ++i) tail<T>()[i] = value;
  }

 private:
  bool map(std::size_t offset, std::size_t bytes, int flags, int file) {
    return mmap(base_ + offset, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, 0) !=
           MAP_FAILED;
  }

  std::size_t size_;
  std::size_t tail_;
  std::byte* base_ = nullptr;
};

}  // namespace tradewind
