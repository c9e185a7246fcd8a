// Owners spread what they made of their shards straight into the memory of other ranks: not into
// what a save there still holds back.
#include <gtest/gtest.h>

#include "arena/gate.h"
#include "share/exchange_ranks.h"

namespace tradewind {
namespace {

// Until the closing is waited for; false after a minute.
bool has_waiter(const GateClosing& closing) {
  const auto deadline = Gate::Clock::now() + std::chrono::minutes(1);
  while (closing.waited_s() == 0.0) {
    if (Gate::Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

std::int32_t num_pieces(const ExchangeRanks& ranks) {
  return static_cast<std::int32_t>(ranks.plan().pieces().size());
}

// One rank's shard of a piece, in arenas laid out like the gradients.
MemoryRange shard_in(const ExchangeRanks& ranks, std::int32_t piece_idx, int rank, Arenas& arenas) {
  const PlanPiece& piece = ranks.plan().pieces()[static_cast<std::size_t>(piece_idx)];
  const PlanBucket& bucket = ranks.plan().buckets()[static_cast<std::size_t>(piece.bucket_idx)];
  const auto r = static_cast<std::size_t>(rank);
  const ByteRange shard = range_between(ranks.layout(), piece.cuts[r], piece.cuts[r + 1]);
  return {arenas[static_cast<std::size_t>(bucket.arena_idx)].data() + shard.begin_bytes,
          shard.size_bytes()};
}

TEST(ExchangeGate, OthersWriteNothingThatIsHeldBack) {
  ExchangeRanks ranks(ExchangeCase{});
  std::vector<Arenas> gathered(2, arenas_of(ranks.layout()));
  for (Arenas& arenas : gathered) fill_all(arenas, std::byte{7});
  std::vector<MemoryRange> held;  // what rank 1 makes for rank 0
  for (std::int32_t piece = 0; piece < num_pieces(ranks); ++piece) {
    held.push_back(shard_in(ranks, piece, 1, gathered[0]));
  }
  const Arenas means = ranks.means(0, 2);
  const auto closing = memory_gate().close(held);
  run_ranks(2, [&](int rank) {
    Arenas& own = gathered[static_cast<std::size_t>(rank)];
    Exchange::Callbacks callbacks;
    callbacks.on_release = [&](std::int32_t piece_idx) {
      const MemoryRange from = shard_in(ranks, piece_idx, rank, ranks.gradients(rank));
      const MemoryRange to = shard_in(ranks, piece_idx, rank, own);
      std::memcpy(const_cast<void*>(to.begin), from.begin, static_cast<std::size_t>(to.size_bytes));
    };
    const auto exchange = ranks.join(rank, callbacks, memory_of(ranks.layout(), own));
    exchange->begin(2);
    ranks.fill(rank, 0);
    for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange->ready(bucket);
    exchange->release();
    if (rank == 0) {
      EXPECT_TRUE(has_waiter(*closing));
      for (const MemoryRange& range : held) {
        const auto* begin = static_cast<const std::byte*>(range.begin);
        EXPECT_EQ(std::count(begin, begin + range.size_bytes, std::byte{7}), range.size_bytes);
      }
      closing->open();
    }
    exchange->wait_all();
  });
  for (const Slot& slot : ranks.layout().slots()) {
    const auto arena = static_cast<std::size_t>(slot.arena_idx);
    for (const Arenas& arenas : gathered) {
      const auto* begin = arenas[arena].data() + slot.offset_bytes;
      EXPECT_TRUE(
          std::equal(begin, begin + slot.size_bytes(), means[arena].data() + slot.offset_bytes))
          << slot.name;
    }
  }
}

// An exchange that ends does not wait for a save.
TEST(ExchangeGate, AFailureEndsTheWait) {
  ExchangeRanks ranks(ExchangeCase{});
  Arenas gathered[2] = {arenas_of(ranks.layout()), arenas_of(ranks.layout())};
  const std::vector<MemoryRange> held{
      {gathered[0][0].data(), static_cast<std::int64_t>(gathered[0][0].size())}};
  const auto closing = memory_gate().close(held);
  const auto errors = errors_of_ranks(2, [&](int rank) {
    Exchange::Callbacks callbacks;
    callbacks.on_release = [](std::int32_t) {};
    const auto exchange = ranks.join(rank, callbacks, memory_of(ranks.layout(), gathered[rank]));
    exchange->begin(2);
    for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange->ready(bucket);
    if (rank == 0) {
      EXPECT_TRUE(has_waiter(*closing));
      exchange->fail_with("enough");
    }
    exchange->wait_all();
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ErrorKind::kPeerLost);
  }
  EXPECT_FALSE(memory_gate().is_open());  // until here
}

}  // namespace
}  // namespace tradewind
