// Saves while training goes on: what the gate lets go, when, and what ends early.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error_matching.h"
#include "base/temporary_directory.h"
#include "base/threaded_parallel.h"
#include "checkpoint/hooked_env.h"
#include "checkpoint/shard_case.h"
#include "checkpoint/shard_writer.h"
#include "step/sweep_case.h"

namespace tradewind {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 20;

// Whether a condition comes true within a minute.
template <class Condition>
bool comes(const Condition& condition) {
  const auto deadline = in_a_minute();
  while (!condition()) {
    if (Gate::Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// Writes wait here until they may pass.
class Turnstile {
 public:
  // A hook for writes.
  std::optional<std::int64_t> operator()(const Access& access) {
    std::unique_lock lock(mutex_);
    arrived_.push_back(access.offset);
    changed_.notify_all();
    changed_.wait(lock, [&] { return num_passes_ > 0; });
    --num_passes_;
    return std::nullopt;
  }
  void let_pass(int count) {
    const std::scoped_lock lock(mutex_);
    num_passes_ += count;
    changed_.notify_all();
  }
  // As if none had come.
  std::vector<std::int64_t> reset() {
    const std::scoped_lock lock(mutex_);
    num_passes_ = 0;
    return std::exchange(arrived_, {});
  }
  // Where writes began so far, once there are so many (or a minute has gone).
  std::vector<std::int64_t> arrived(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::minutes(1), [&] { return arrived_.size() >= count; });
    return arrived_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> arrived_;
  int num_passes_ = 0;
};

class ShardGate : public TemporaryDirectory {
 protected:
  std::shared_ptr<Env> slow_env() {
    return std::make_shared<HookedEnv>([this](const Access& access) { return turnstile(access); });
  }
  [[nodiscard]] std::string contents() const {
    return posix_env().read_file(at("shard"), std::int64_t{1} << 30);
  }
  // Of a block, without the header.
  [[nodiscard]] std::int64_t memory_bytes_in(const ShardLayout& layout, std::int64_t block) const {
    const auto header_bytes = static_cast<std::int64_t>(input.header.size());
    std::int64_t found = 0;
    layout.visit(std::max(header_bytes, layout.block_begin(block)), layout.block_end(block),
                 [&](std::int64_t, const std::byte*, std::int64_t bytes) { found += bytes; });
    return found;
  }
  static void expect_cancelled(const ShardWrite& write) {
    try {
      (void)write.result();
      ADD_FAILURE() << "expected ECANCELED";
    } catch (const Error& error) {
      EXPECT_EQ(error.error_number(), ECANCELED) << error.what();
    }
  }

  Turnstile turnstile;
  // Two arrays that sweeps go through side by side; each begins at a page, and is two blocks and a
  // bit long.
  ShardCase input{{2 * kBlock + 5000, 2 * kBlock + 5000}, 0, kBlock};
};

TEST_F(ShardGate, IsLetGoBlockByBlockAsTheirWritesReturn) {
  ShardWriter writer(1);  // one write at a time
  turnstile.let_pass(1000);
  const auto counted = writer.start(input.request(slow_env(), at("counted")));
  ASSERT_TRUE(counted->wait_until(in_a_minute()));
  const std::size_t num_writes = turnstile.reset().size();

  const auto closing = memory_gate().close(input.ranges());
  ShardWriter::Request request = input.request(slow_env(), at("shard"));
  const ShardLayout layout(request.header, request.regions, kBlock);
  request.closing = closing;
  const auto write = writer.start(std::move(request));
  std::int64_t held = 2 * (2 * kBlock + 5000);
  std::int64_t block = 0;
  for (std::size_t i = 0; i < num_writes; ++i) {
    const std::vector<std::int64_t> offsets = turnstile.arrived(i + 1);
    ASSERT_EQ(offsets.size(), i + 1);
    // The blocks before this write's one have been written, and nothing else is let go.
    if (offsets[i] / kBlock != block) held -= memory_bytes_in(layout, block);
    block = offsets[i] / kBlock;
    EXPECT_EQ(closing->held_bytes(), held) << "at write " << i;
    turnstile.let_pass(1);
  }
  ASSERT_TRUE(write->wait_until(in_a_minute()));
  EXPECT_EQ(write->result().size_bytes, static_cast<std::int64_t>(input.file.size()));
  EXPECT_TRUE(memory_gate().is_open());
  EXPECT_TRUE(contents() == input.file);
}

TEST_F(ShardGate, WhatSweepsWantFirstGoesFirst) {
  const auto closing = memory_gate().close(input.ranges());
  turnstile.let_pass(1000);
  ShardWriter writer(1);
  ShardWriter::Request request = input.request(slow_env(), at("shard"));
  request.closing = closing;
  const auto write = writer.start(std::move(request));
  ASSERT_TRUE(write->wait_until(in_a_minute()));
  std::vector<std::int64_t> blocks;
  for (const std::int64_t offset : turnstile.arrived(0)) {
    if (blocks.empty() || blocks.back() != offset / kBlock) blocks.push_back(offset / kBlock);
  }
  // The second array begins in block 2.
  EXPECT_EQ(blocks, (std::vector<std::int64_t>{0, 2, 3, 1, 4}));
}

TEST_F(ShardGate, MemoryThatStandsInTheFileTwiceIsHeldUntilAllIsWritten) {
  ShardWriter::Request request = input.request(slow_env(), at("shard"));
  request.regions[1].data = request.regions[0].data;
  const auto closing =
      memory_gate().close(std::vector<MemoryRange>{{input.memory[0].data(), 2 * kBlock + 5000}});
  request.closing = closing;
  ShardWriter writer(1);
  const auto write = writer.start(std::move(request));
  for (std::size_t num_writes = 1; num_writes <= 5; ++num_writes) {
    (void)turnstile.arrived(num_writes);
    EXPECT_EQ(closing->held_bytes(), 2 * kBlock + 5000);
    turnstile.let_pass(1);
  }
  turnstile.let_pass(1000);
  ASSERT_TRUE(write->wait_until(in_a_minute()));
  EXPECT_TRUE(memory_gate().is_open());
}

TEST_F(ShardGate, CancellingOpensAtOnceAndEndsWithWhatIsUnderWay) {
  const auto closing = memory_gate().close(input.ranges());
  ShardWriter writer(2);
  ShardWriter::Request request = input.request(slow_env(), at("shard"));
  request.closing = closing;
  const auto write = writer.start(request);
  ASSERT_EQ(turnstile.arrived(2).size(), 2U);
  expect_error(ErrorKind::kBadState, {at("shard"), "over"}, [&] { (void)write->result(); });
  expect_error(ErrorKind::kBadState, {"one save at a time"}, [&] { (void)writer.start(request); });
  write->cancel();
  EXPECT_TRUE(memory_gate().is_open());
  EXPECT_FALSE(write->wait_until(Gate::Clock::now()));  // two threads still read the memory
  turnstile.let_pass(1000);
  ASSERT_TRUE(write->wait_until(in_a_minute()));
  expect_cancelled(*write);
  write->cancel();
  expect_cancelled(*write);
  posix_env().remove(at("shard"));
  const auto again = writer.start(input.request(shared_posix_env(), at("shard")));
  ASSERT_TRUE(again->wait_until(in_a_minute()));
  (void)again->result();
  again->cancel();  // too late to matter
  EXPECT_EQ(again->result().size_bytes, static_cast<std::int64_t>(input.file.size()));
}

TEST_F(ShardGate, ClosingTheWriterEndsASave) {
  const auto closing = memory_gate().close(input.ranges());
  auto writer = std::make_unique<ShardWriter>(2);
  ShardWriter::Request request = input.request(slow_env(), at("shard"));
  request.closing = closing;
  const auto write = writer->start(std::move(request));
  ASSERT_EQ(turnstile.arrived(2).size(), 2U);
  std::thread closer([&] { writer.reset(); });
  EXPECT_TRUE(comes([] { return memory_gate().is_open(); }));
  turnstile.let_pass(1000);
  closer.join();
  ASSERT_TRUE(write->wait_until(Gate::Clock::now()));
  expect_cancelled(*write);
}

TEST_F(ShardGate, ASaveThatNobodyWaitsForGoesOn) {
  ShardWriter writer(2);
  turnstile.let_pass(1000);
  const auto closing = memory_gate().close(input.ranges());
  ShardWriter::Request request = input.request(slow_env(), at("shard"));
  request.closing = closing;
  (void)writer.start(std::move(request));
  EXPECT_TRUE(comes([] { return memory_gate().is_open(); }));
  EXPECT_TRUE(comes([&] { return contents() == input.file; }));
}

// The whole of it: a sweep begins while its memory is being saved, and follows the writer.
TEST_F(ShardGate, TheFileHoldsWhatWasThereBeforeTheSweep) {
  SlotTable table;
  table.add(uniform_storage(Format::kFloat32), find_rule("adamw"), 3'000'000);
  const SlotTable before = table;
  const SlotTable expected = swept(table, 0.37, kernels(), kThreads<2>);
  UpdateArrays& arrays = table.entries()[0].arrays;
  ShardWriter::Request request;
  request.header = std::string(4096, ' ');
  request.path = at("shard");
  request.block_bytes = kBlock;
  std::vector<MemoryRange> ranges;
  std::string file = request.header;
  for (StoredArray* array : {&arrays.parameter, &arrays.states[0], &arrays.states[1]}) {
    const auto size = static_cast<std::int64_t>(array->bytes.size());
    ranges.push_back({array->bytes.data(), size});
    request.regions.push_back({static_cast<std::int64_t>(file.size()), array->bytes.data(), size});
    file.append(reinterpret_cast<const char*>(array->bytes.data()), array->bytes.size());
    file.resize(static_cast<std::size_t>(round_up_to_page(static_cast<std::int64_t>(file.size()))));
  }
  request.closing = memory_gate().close(ranges);
  const auto closing = request.closing;
  std::atomic<bool> is_first = true;
  std::atomic<bool> has_waited = false;
  request.env = std::make_shared<HookedEnv>([&](const Access&) -> std::optional<std::int64_t> {
    // Nothing is written before the sweep wants it.
    if (is_first.exchange(false)) {
      has_waited = comes([&] { return closing->waited_s() > 0.0; });
    }
    std::this_thread::yield();
    return std::nullopt;
  });
  ShardWriter writer(1);
  const auto write = writer.start(std::move(request));
  const std::vector<SweepSlot> slots = table.slots();
  const std::vector<ScalarBlock> scalars = table.scalars();
  Sweep sweep;
  sweep.run(slots, scalars, {.gradient_multiplier = 0.37}, kernels(), kThreads<2>);
  EXPECT_TRUE(has_waited);
  ASSERT_TRUE(write->wait_until(in_a_minute()));
  (void)write->result();
  EXPECT_TRUE(contents() == file);
  EXPECT_TRUE(table == expected);
  EXPECT_FALSE(table == before);
}

}  // namespace
}  // namespace tradewind
