// A sweep while a save holds memory back: it writes nothing of it before it may, and then makes of
// it what it always does.
#include <gtest/gtest.h>

#include <thread>

#include "arena/gate.h"
#include "base/threaded_parallel.h"
#include "step/sweep_case.h"

namespace tradewind {
namespace {

using Bytes = std::vector<std::byte>;

struct Array {
  std::string name;
  void* data;
  std::int64_t size_bytes;
};

template <class Row>
void add(std::vector<Array>& arrays, const std::string& name, Row& row) {
  if (row.empty()) return;
  arrays.push_back({name, row.data(), static_cast<std::int64_t>(row.size() * sizeof(row[0]))});
}

// All that a sweep writes.
std::vector<Array> written_by_sweep(SlotTable& table) {
  std::vector<Array> arrays;
  for (std::size_t i = 0; i < table.entries().size(); ++i) {
    UpdateArrays& own = table.entries()[i].arrays;
    const std::string slot = "slot " + std::to_string(i);
    add(arrays, slot + " parameter", own.parameter.bytes);
    add(arrays, slot + " master", own.master.bytes);
    for (std::size_t s = 0; s < own.states.size(); ++s) {
      add(arrays, slot + " state " + std::to_string(s), own.states[s].bytes);
      add(arrays, slot + " exponents " + std::to_string(s), own.states[s].exponents);
    }
  }
  return arrays;
}

Bytes copied(const Array& array) {
  const auto* begin = static_cast<const std::byte*>(array.data);
  return {begin, begin + array.size_bytes};
}

// Runs a sweep of `table` on a thread of its own.
class Sweeping {
 public:
  Sweeping(SlotTable& table, const Parallel& parallel)
      : scalars_(table.scalars()),
        slots_(table.slots()),
        transform_(example_transform(table)),
        thread_([this, &parallel] {
          sweep_.run(slots_, scalars_, {.gradient_multiplier = 0.37, .transform = &transform_},
                     kernels(), parallel);
        }) {}
  void join() { thread_.join(); }

 private:
  std::vector<ScalarBlock> scalars_;
  std::vector<SweepSlot> slots_;
  MatrixTransform transform_;
  Sweep sweep_;
  std::thread thread_;
};

// Until the sweep waits for the closing; false after a minute.
bool has_waiter(const GateClosing& closing) {
  const auto deadline = Gate::Clock::now() + std::chrono::minutes(1);
  while (closing.waited_s() == 0.0) {
    if (Gate::Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// Two slots of every rule, in storages that have masters, exponents and neither.
SlotTable one_of_each() {
  SlotTable table;
  const std::vector<Storage> storages = example_storages();
  for (int rule = 0; rule < num_rules(); ++rule) {
    table.add(storages[6], rule, 5000);  // a float32 master, exponents
    table.add(storages[4], rule, 300);   // a split one
  }
  return table;
}

TEST(SweepGate, WaitsForEveryArrayThatItWrites) {
  const SlotTable before = one_of_each();
  const SlotTable expected = swept(before, 0.37, kernels(), kSerial);
  SlotTable counted = before;
  const std::size_t num_arrays = written_by_sweep(counted).size();
  for (std::size_t i = 0; i < num_arrays; ++i) {
    SlotTable table = before;
    const Array array = written_by_sweep(table)[i];
    const Bytes old = copied(array);
    const std::vector<MemoryRange> ranges{{array.data, array.size_bytes}};
    const auto closing = memory_gate().close(ranges);
    Sweeping sweeping(table, i % 2 == 0 ? kSerial : kThreads<3>);
    EXPECT_TRUE(has_waiter(*closing)) << array.name;
    EXPECT_EQ(copied(array), old) << array.name;
    closing->open();
    sweeping.join();
    EXPECT_TRUE(table == expected) << array.name;
  }
}

// Long enough to be swept in several parts, and its memory to lie in several pieces.
TEST(SweepGate, FollowsWhatIsLetGoPartByPart) {
  SlotTable before;
  before.add(uniform_storage(Format::kFloat32), find_rule("adamw"), 2'500'000);
  before.add(uniform_storage(Format::kFloat32), find_rule("lamb"), 1'300'000);
  const SlotTable expected = swept(before, 0.37, kernels(), kThreads<2>);
  for (const Parallel& parallel : {kSerial, kThreads<3>}) {
    SlotTable table = before;
    const std::vector<Array> arrays = written_by_sweep(table);
    std::vector<MemoryRange> ranges;
    std::vector<Bytes> old, saved;
    for (const Array& array : arrays) {
      ranges.push_back({array.data, array.size_bytes});
      old.push_back(copied(array));
      saved.emplace_back(old.back().size());
    }
    const auto closing = memory_gate().close(ranges);
    Sweeping sweeping(table, parallel);
    EXPECT_TRUE(has_waiter(*closing));
    constexpr std::int64_t kBlock = 1'000'000;  // of all arrays by turns
    for (std::int64_t begin = 0; closing->held_bytes() > 0; begin += kBlock) {
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        const std::int64_t bytes = std::min(kBlock, arrays[i].size_bytes - begin);
        if (bytes <= 0) continue;
        std::byte* const from = static_cast<std::byte*>(arrays[i].data) + begin;
        std::copy(from, from + bytes, saved[i].begin() + begin);
        closing->release(from, bytes);
      }
    }
    sweeping.join();
    EXPECT_EQ(saved, old);
    EXPECT_TRUE(table == expected);
  }
}

}  // namespace
}  // namespace tradewind
