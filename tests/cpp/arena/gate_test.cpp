// Waits are observed through waited_s(), which grows while somebody waits: no test sleeps.
#include "arena/gate.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>

#include "arena/memory.h"
#include "base/error_matching.h"

namespace tradewind {
namespace {

using Clock = Gate::Clock;
constexpr std::int64_t kPiece = GateClosing::kPieceBytes;

// Begins at a piece's address.
class Pieces {
 public:
  explicit Pieces(std::int64_t count) : memory_((count + 1) * kPiece, ArenaMemory::Fork::kShare) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = memory_.data() + (kPiece - static_cast<std::int64_t>(address % kPiece)) % kPiece;
  }
  [[nodiscard]] std::byte* at(std::int64_t offset) const { return begin_ + offset; }

 private:
  ArenaMemory memory_;
  std::byte* begin_;
};

bool is_open(const void* begin, std::int64_t size_bytes) {
  return memory_gate().wait_until(begin, size_bytes, Clock::now());
}

std::shared_ptr<GateClosing> close(std::vector<MemoryRange> ranges) {
  return memory_gate().close(ranges);
}

// Until somebody waits for the closing; false after a minute.
bool has_waiter(const GateClosing& closing) {
  const auto deadline = Clock::now() + std::chrono::minutes(1);
  while (closing.waited_s() == 0.0) {
    if (Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(Gate, IsOpenUntilItIsClosedAndOpenAgainAfter) {
  const Pieces memory(1);
  EXPECT_TRUE(memory_gate().is_open());
  EXPECT_TRUE(is_open(memory.at(0), kPiece));
  auto closing = close({{memory.at(0), 100}});
  EXPECT_FALSE(memory_gate().is_open());
  EXPECT_FALSE(is_open(memory.at(0), 1));
  closing->open();
  EXPECT_TRUE(memory_gate().is_open());
  EXPECT_TRUE(is_open(memory.at(0), kPiece));
  closing->open();
  EXPECT_TRUE(memory_gate().is_open());
}

TEST(Gate, HoldsTheBytesOfItsRangesAndNoOthers) {
  const Pieces memory(4);
  const std::int64_t begin = kPiece - 10, size = kPiece + 30;  // in three pieces
  const auto closing = close({{memory.at(begin), size}, {memory.at(3 * kPiece), 8}});
  EXPECT_EQ(closing->held_bytes(), size + 8);
  EXPECT_TRUE(is_open(memory.at(0), begin));
  EXPECT_FALSE(is_open(memory.at(0), begin + 1));
  EXPECT_FALSE(is_open(memory.at(begin), 1));
  EXPECT_FALSE(is_open(memory.at(begin + size - 1), 1));
  EXPECT_TRUE(is_open(memory.at(begin + size), 3 * kPiece - begin - size));
  EXPECT_FALSE(is_open(memory.at(begin + size), 3 * kPiece - begin - size + 1));
  EXPECT_TRUE(is_open(memory.at(3 * kPiece + 8), kPiece));
  EXPECT_TRUE(is_open(memory.at(begin), 0));
}

TEST(Gate, APieceOpensWithItsLastByte) {
  const Pieces memory(3);
  const auto closing = close({{memory.at(0), 3 * kPiece}});
  closing->release(memory.at(kPiece), kPiece - 1);
  EXPECT_FALSE(is_open(memory.at(kPiece), 1));
  closing->release(memory.at(2 * kPiece - 1), 2);  // and the first byte of the third
  EXPECT_TRUE(is_open(memory.at(kPiece), kPiece));
  EXPECT_FALSE(is_open(memory.at(kPiece), kPiece + 1));
  EXPECT_FALSE(is_open(memory.at(kPiece - 1), 1));
  EXPECT_EQ(closing->held_bytes(), 2 * kPiece - 1);
}

TEST(Gate, IsOpenWithItsLastPiece) {
  const Pieces memory(3);
  const auto closing = close({{memory.at(5), kPiece}, {memory.at(2 * kPiece), 7}});
  closing->release(memory.at(0), 3 * kPiece);  // what was not closed is passed over
  EXPECT_EQ(closing->held_bytes(), 0);
  EXPECT_TRUE(memory_gate().is_open());
}

TEST(Gate, RangesMayTouchAndOverlap) {
  const Pieces memory(2);
  const auto closing = close({{memory.at(100), 100},
                              {memory.at(0), 60},
                              {memory.at(50), 50},
                              {memory.at(120), 10},
                              {memory.at(500), 0}});
  EXPECT_EQ(closing->held_bytes(), 200);
  closing->release(memory.at(0), 200);
  EXPECT_TRUE(memory_gate().is_open());
}

TEST(Gate, NothingToHoldIsOpen) {
  const auto closing = close({});
  EXPECT_TRUE(memory_gate().is_open());
  closing->release(nullptr, 10);
  EXPECT_EQ(closing->held_bytes(), 0);
}

TEST(Gate, RefusesANegativeSize) {
  const Pieces memory(1);
  expect_error(ErrorKind::kBadValue, {"gate", "-1"}, [&] { (void)close({{memory.at(0), -1}}); });
  EXPECT_TRUE(memory_gate().is_open());
}

TEST(Gate, WaitsForEveryClosing) {
  const Pieces memory(1);
  auto first = close({{memory.at(0), 100}});
  auto second = close({{memory.at(50), 100}});
  first->open();
  EXPECT_TRUE(is_open(memory.at(0), 50));
  EXPECT_FALSE(is_open(memory.at(0), 51));
  second.reset();  // the destructor opens
  EXPECT_TRUE(is_open(memory.at(0), 200));
  EXPECT_TRUE(memory_gate().is_open());
}

TEST(Gate, WakesWhoWaits) {
  const Pieces memory(2);
  for (const bool opens_all : {false, true}) {
    const auto closing = close({{memory.at(0), 2 * kPiece}});
    std::thread waiter([&] { memory_gate().wait(memory.at(kPiece), kPiece); });
    EXPECT_TRUE(has_waiter(*closing));
    if (opens_all) {
      closing->open();
    } else {
      closing->release(memory.at(kPiece), kPiece);
    }
    waiter.join();
    EXPECT_EQ(memory_gate().is_open(), opens_all);
  }
}

TEST(Gate, CountsWallTimeOnceHoweverManyWait) {
  const Pieces memory(1);
  const auto closing = close({{memory.at(0), kPiece}});
  EXPECT_EQ(closing->waited_s(), 0.0);
  const auto began = Clock::now();
  std::atomic<int> num_begun = 0;
  std::vector<std::thread> waiters;
  for (int i = 0; i < 8; ++i) {
    waiters.emplace_back([&] {
      ++num_begun;
      memory_gate().wait(memory.at(0), 1);
    });
  }
  EXPECT_TRUE(has_waiter(*closing));
  while (num_begun < 8) std::this_thread::yield();
  closing->open();
  for (std::thread& waiter : waiters) waiter.join();
  const double waited = closing->waited_s();
  EXPECT_GT(waited, 0.0);
  EXPECT_LE(waited, std::chrono::duration<double>(Clock::now() - began).count());
  EXPECT_EQ(closing->waited_s(), waited);  // nobody waits any more
}

TEST(Gate, SaysWhereAnAddressLiesInItsRange) {
  const Pieces memory(2);
  const auto closing = close({{memory.at(0), 1000}, {memory.at(1000), 200}});
  EXPECT_EQ(closing->position_of(memory.at(0)), 0.0);
  EXPECT_EQ(closing->position_of(memory.at(500)), 0.5);
  EXPECT_EQ(closing->position_of(memory.at(1000)), 0.0);  // neighbours stay ranges of their own
  EXPECT_EQ(closing->position_of(memory.at(1150)), 0.75);
  EXPECT_EQ(closing->position_of(memory.at(1200)), 1.0);
}

// A writer copies out what others change as soon as they may: it must see old bytes alone.
TEST(Gate, WhatIsCopiedOutIsWhatWasThereWhenItClosed) {
  constexpr std::int64_t kBytes = 5 * kPiece;
  const Pieces memory(5);
  const std::int64_t offset = 777;  // blocks and pieces do not fall together
  const std::int64_t size = kBytes - 2 * offset;
  std::byte* const begin = memory.at(offset);
  std::fill(begin, begin + size, std::byte{1});
  std::vector<std::byte> copied(static_cast<std::size_t>(size));
  const auto closing = close({{begin, size}});
  constexpr std::int64_t kStride = 1 << 19;
  std::vector<std::thread> changing;
  for (std::int64_t part = 0; part < 3; ++part) {
    changing.emplace_back([&, part] {
      for (std::int64_t at = part * kStride; at < size; at += 3 * kStride) {
        const std::int64_t bytes = std::min(kStride, size - at);
        memory_gate().wait(begin + at, bytes);
        std::fill(begin + at, begin + at + bytes, std::byte{2});
      }
    });
  }
  EXPECT_TRUE(has_waiter(*closing));
  for (std::int64_t at = 0; at < size; at += 300'000) {
    const std::int64_t bytes = std::min<std::int64_t>(300'000, size - at);
    std::copy(begin + at, begin + at + bytes, copied.begin() + at);
    closing->release(begin + at, bytes);
  }
  for (std::thread& thread : changing) thread.join();
  EXPECT_EQ(std::count(copied.begin(), copied.end(), std::byte{1}), size);
  EXPECT_EQ(std::count(begin, begin + size, std::byte{2}), size);
  EXPECT_TRUE(memory_gate().is_open());
}

template <class Body>
int exit_code_of_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Gate, AForkedChildSeesItOpen) {
  const Pieces memory(1);
  auto closing = close({{memory.at(0), 100}});
  // Somebody sleeps on the locks that the child inherits.
  std::thread waiter([&] { memory_gate().wait(memory.at(0), 1); });
  EXPECT_TRUE(has_waiter(*closing));
  const int code = exit_code_of_child([&] {
    if (!memory_gate().is_open()) return 1;
    memory_gate().wait(memory.at(0), 100);
    closing->release(memory.at(0), 10);
    if (closing->held_bytes() != 0 || closing->waited_s() != 0.0) return 2;
    closing->open();
    closing.reset();
    auto own = close({{memory.at(0), 100}});  // a gate of its own
    if (is_open(memory.at(0), 1)) return 3;
    own.reset();
    return memory_gate().is_open() ? 0 : 4;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(closing->held_bytes(), 100);
  EXPECT_FALSE(is_open(memory.at(0), 1));
  closing->open();
  waiter.join();
}

}  // namespace
}  // namespace tradewind
