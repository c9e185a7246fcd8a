#include "share/neighbours.h"

#include <unistd.h>

#include <atomic>
#include <utility>

namespace tradewind {
namespace {

constexpr std::int64_t kPageBytes = 4096;

std::int64_t round_up(std::int64_t size_bytes) {
  return (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// SAFETY: words begin at a page, and the file's memory is nothing but bytes to the language.
std::atomic_ref<std::uint64_t> word_at(std::byte* memory, std::int64_t word_idx) {
  static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free, "processes share no locks");
  return std::atomic_ref(reinterpret_cast<std::uint64_t*>(memory)[word_idx]);
}

}  // namespace

Neighbours::Neighbours(HostLinks::Options options, const std::vector<std::int64_t>& arena_bytes,
                       std::int64_t num_words)
    : links_(std::move(options)) {
  std::int64_t size_bytes = round_up(num_words * static_cast<std::int64_t>(sizeof(std::uint64_t)));
  for (const std::int64_t bytes : arena_bytes) {
    offsets_.push_back(size_bytes);
    size_bytes += round_up(bytes);
  }
  own_ = std::make_shared<HostMemory>(size_bytes);
  std::vector<int> files = links_.trade_files(own_->file());
  try {
    for (int& file : files) {
      const int taken = std::exchange(file, -1);
      theirs_.push_back(taken < 0 ? nullptr : std::make_unique<HostMemory>(taken, size_bytes));
    }
  } catch (...) {
    for (const int file : files) {
      if (file >= 0) (void)close(file);
    }
    throw;
  }
  own_->close_file();
}

std::byte* Neighbours::memory(int place) const {
  return place == own_place() ? own_->data() : theirs_[static_cast<std::size_t>(place)]->data();
}

std::byte* Neighbours::arena(int place, std::size_t arena_idx) const {
  return memory(place) + offsets_[arena_idx];
}

void Neighbours::announce(std::int64_t word_idx, std::uint64_t value) noexcept {
  word_at(own_->data(), word_idx).store(value, std::memory_order_release);
  links_.ring();
}

std::uint64_t Neighbours::word(int place, std::int64_t word_idx) const noexcept {
  return word_at(memory(place), word_idx).load(std::memory_order_acquire);
}

}  // namespace tradewind
