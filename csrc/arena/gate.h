// Memory that is being written to a file while training goes on. Whoever changes such memory (a
// sweep, above all) asks the gate first, range by range, and waits for what has not been handed to
// the file yet. Any thread may call anything here. In a forked child the gate is open, and what was
// closed in the parent is none of the child's. A wait ends when whoever closed lets go, so a save
// must have a deadline of its own: GateClosing::open() lets everyone go on at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tradewind {

struct MemoryRange {
  const void* begin = nullptr;
  std::int64_t size_bytes = 0;
};

// What was closed at once. It opens piece by piece as bytes are released, at the latest with its
// destructor.
class GateClosing {
 public:
  // Cut at multiples of this address: large enough that a piece costs nothing beside its bytes,
  // small enough that a sweep follows closely.
  static constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;

  struct State;
  explicit GateClosing(std::shared_ptr<State> state);
  ~GateClosing() noexcept;
  GateClosing(const GateClosing&) = delete;
  GateClosing& operator=(const GateClosing&) = delete;

  // These bytes may change from now on; a piece opens with its last byte. Each byte is released
  // once; bytes that were not closed are passed over.
  void release(const void* begin, std::int64_t size_bytes) noexcept;
  // All that is left. Idempotent.
  void open() noexcept;

  // How long at least one thread waited for these ranges, so far: wall time, counted once however
  // many threads wait.
  [[nodiscard]] double waited_s() const;
  [[nodiscard]] std::int64_t held_bytes() const noexcept;
  // Where an address lies in its range: 0 at the beginning, below 1 at the end, 1 where it was not
  // closed. Sweeps go through all ranges at the same pace, so what comes first here is wanted
  // first.
  [[nodiscard]] double position_of(const void* address) const noexcept;

 private:
  std::shared_ptr<State> state_;
};

class Gate {
 public:
  using Clock = std::chrono::steady_clock;

  // From now on writers wait for these ranges (which may touch and overlap; empty ones are left
  // out). Whoever closes sees to it that no sweep is under way.
  // Throws Error(kBadValue) for a negative size.
  [[nodiscard]] std::shared_ptr<GateClosing> close(std::span<const MemoryRange> ranges);

  // Costs one load while nothing is closed.
  [[nodiscard]] bool is_open() const noexcept {
    return num_closed_.load(std::memory_order_acquire) == 0;
  }
  // Until every byte of the range may change.
  void wait(const void* begin, std::int64_t size_bytes) const {
    if (!is_open()) (void)wait_closed(begin, size_bytes, nullptr);
  }
  // The same; false where the deadline came first.
  [[nodiscard]] bool wait_until(const void* begin, std::int64_t size_bytes,
                                Clock::time_point deadline) const {
    return is_open() || wait_closed(begin, size_bytes, &deadline);
  }

 private:
  friend class GateClosing;
  friend Gate& memory_gate();
  using States = std::vector<std::shared_ptr<GateClosing::State>>;
  struct Guarded;

  Gate();
  bool wait_closed(const void* begin, std::int64_t size_bytes,
                   const Clock::time_point* deadline) const;
  void remove(const std::shared_ptr<GateClosing::State>& state) noexcept;
  void lock_for_fork() noexcept;
  void unlock_after_fork() noexcept;
  void open_in_child() noexcept;

  std::atomic<std::int64_t> num_closed_{0};
  Guarded* guarded_;  // never freed: a thread may wait while the process ends
};

// The one of this process.
Gate& memory_gate();

}  // namespace tradewind
