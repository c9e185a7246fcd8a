#include "cuda_emulation/grid.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "base/split_mix.h"
#include "cuda_emulation/cuda_runtime.h"
#include "cuda_emulation/fiber.h"

GridIndex threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_emulation {
namespace {

enum class Wait : std::uint8_t { kNone, kBlock, kWarp, kFinished };

struct Thread {
  std::unique_ptr<Fiber> fiber;
  Wait wait = Wait::kNone;
};

// What the lanes of a warp bring to an operation, and what they find when all have come.
struct Warp {
  unsigned num_waiting = 0;
  WarpOperation operation = WarpOperation::kSync;
  std::uint64_t brought[kWarpThreads] = {};
  std::uint64_t found[kWarpThreads] = {};
};

struct Grid {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned> warp_order, lane_order;
  std::vector<std::byte> shared;
  const std::function<void()>* thread_body = nullptr;
  unsigned num_threads = 0;
  unsigned current = 0;
  unsigned num_in_block_barrier = 0;
  std::uint64_t seed = 0;
  Counts counts;
  std::string failure;
};

Grid& grid() {
  static Grid the_grid;
  return the_grid;
}

void fail(const std::string& what) {
  if (!grid().failure.empty()) return;
  grid().failure = "block " + std::to_string(blockIdx.x) + ", thread " +
                   std::to_string(grid().current) + ": " + what;
}

void wait_as(Wait wait) {
  Thread& thread = grid().threads[grid().current];
  thread.wait = wait;
  thread.fiber->leave();
}

void release(Wait wait, unsigned begin, unsigned end) {
  for (unsigned t = begin; t < end; ++t) {
    if (grid().threads[t].wait == wait) grid().threads[t].wait = Wait::kNone;
  }
}

void make_threads(unsigned num_threads) {
  Grid& all = grid();
  while (all.threads.size() < num_threads) {
    all.threads.push_back(
        {std::make_unique<Fiber>([](void*) { (*grid().thread_body)(); }, nullptr), Wait::kNone});
  }
  all.num_threads = num_threads;
  all.warps.resize(num_threads / kWarpThreads);
}

template <class Random>
void shuffle(Random& random, std::vector<unsigned>& values, unsigned count) {
  values.resize(count);
  std::iota(values.begin(), values.end(), 0U);
  for (std::size_t i = values.size(); grid().seed != 0 && i > 1; --i) {
    const auto other = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)));
    std::swap(values[i - 1], values[other]);
  }
}

bool enter_lane(unsigned t) {
  Grid& all = grid();
  Thread& thread = all.threads[t];
  if (thread.wait != Wait::kNone || !all.failure.empty()) return false;
  all.current = t;
  threadIdx.x = t;
  thread.fiber->enter();
  if (thread.fiber->has_returned()) thread.wait = Wait::kFinished;
  return true;
}

// Runs each warp as far as it gets before the next: so the one that comes last to a barrier is far
// ahead of the others when they go on. False where none could run.
bool run_round() {
  bool has_run = false;
  for (const unsigned warp : grid().warp_order) {
    for (bool runs = true; runs; has_run = has_run || runs) {
      runs = false;
      for (const unsigned lane : grid().lane_order) {
        runs = enter_lane(warp * kWarpThreads + lane) || runs;
      }
    }
  }
  return has_run;
}

bool run_block(unsigned block) {
  Grid& all = grid();
  blockIdx.x = block;
  for (unsigned t = 0; t < all.num_threads; ++t) all.threads[t].wait = Wait::kNone;
  std::fill(all.warps.begin(), all.warps.end(), Warp{});
  std::fill(all.shared.begin(), all.shared.end(), std::byte{0xA5});
  all.num_in_block_barrier = 0;
  tradewind::SplitMix random(all.seed + block);
  shuffle(random, all.warp_order, all.num_threads / kWarpThreads);
  shuffle(random, all.lane_order, kWarpThreads);
  while (run_round()) {
  }
  const auto count = [&](Wait wait) {
    return std::count_if(all.threads.begin(), all.threads.begin() + all.num_threads,
                         [&](const Thread& thread) { return thread.wait == wait; });
  };
  if (all.failure.empty() && count(Wait::kFinished) != all.num_threads) {
    fail(std::to_string(count(Wait::kBlock)) + " threads wait at __syncthreads and " +
         std::to_string(count(Wait::kWarp)) + " at a warp's operation for others, of which " +
         std::to_string(count(Wait::kFinished)) + " have finished");
  }
  if (all.failure.empty()) return true;
  for (Thread& thread : all.threads) thread.fiber->restart();
  return false;
}

}  // namespace

void set_order(std::uint64_t seed) { grid().seed = seed; }
Counts& counts() { return grid().counts; }
std::string& failure() { return grid().failure; }
void* shared_memory() { return grid().shared.data(); }

void fail_access(const void* address, std::size_t bytes) {
  fail("an access of " + std::to_string(bytes) + " bytes at an address that ends in " +
       std::to_string(reinterpret_cast<std::uintptr_t>(address) % 16) + " of 16");
}

int launch(unsigned num_blocks, unsigned num_threads, std::size_t num_shared_bytes,
           const std::function<void()>& thread) {
  Grid& all = grid();
  if (!all.failure.empty()) return kLaunchFailure;
  if (num_threads == 0 || num_threads % kWarpThreads != 0 || num_threads > 1024 ||
      num_shared_bytes > std::size_t{48} << 10U) {
    return cudaErrorInvalidValue;
  }
  ++all.counts.launches;
  make_threads(num_threads);
  all.shared.assign(num_shared_bytes, std::byte{});
  all.shared.shrink_to_fit();
  all.thread_body = &thread;
  blockDim = {num_threads, 1, 1};
  gridDim = {num_blocks, 1, 1};
  for (unsigned block = 0; block < num_blocks; ++block) {
    if (!run_block(block)) return kLaunchFailure;
  }
  return cudaSuccess;
}

void sync_block() {
  Grid& all = grid();
  if (++all.num_in_block_barrier < all.num_threads) {
    wait_as(Wait::kBlock);
    return;
  }
  all.num_in_block_barrier = 0;
  release(Wait::kBlock, 0, all.num_threads);
}

std::uint64_t exchange(unsigned mask, WarpOperation operation, std::uint64_t brought,
                       unsigned source) {
  Grid& all = grid();
  Warp& warp = all.warps[all.current / kWarpThreads];
  if (mask != 0xFFFFFFFFU) fail("a warp's operation without all of its lanes");
  if (warp.num_waiting > 0 && warp.operation != operation) {
    fail("a warp whose lanes meet at different operations");
  }
  warp.operation = operation;
  warp.brought[all.current % kWarpThreads] = brought;
  if (++warp.num_waiting < kWarpThreads) {
    wait_as(Wait::kWarp);
  } else {
    warp.num_waiting = 0;
    std::copy(std::begin(warp.brought), std::end(warp.brought), std::begin(warp.found));
    const unsigned first = all.current / kWarpThreads * kWarpThreads;
    release(Wait::kWarp, first, first + kWarpThreads);
  }
  return warp.found[source];
}

std::uint32_t ballot(unsigned mask, bool vote) {
  Warp& warp = grid().warps[grid().current / kWarpThreads];
  exchange(mask, WarpOperation::kBallot, vote ? 1 : 0, 0);
  std::uint32_t bits = 0;
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    if (warp.found[lane] != 0) bits |= 1U << lane;
  }
  return bits;
}

}  // namespace cuda_emulation
