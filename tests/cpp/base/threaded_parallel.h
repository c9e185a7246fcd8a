// Parallels on std::thread. They cut finer and less evenly than the contract's grain allows, so a
// result that depends on where ranges are cut, or on who runs them, shows.
#pragma once

#include <algorithm>
#include <array>
#include <thread>
#include <vector>

#include "base/parallel.h"

namespace tradewind {

template <int kNumThreads>
void run_threads(std::int64_t total, std::int64_t /*grain*/, void* context, RangeBody body) {
  constexpr std::array<std::int64_t, 5> kLengths{3, 1, 7, 2, 5};
  const auto run_one = [=](std::int64_t thread_idx) {
    std::int64_t begin = 0;
    for (std::int64_t piece = 0; begin < total; ++piece) {
      const std::int64_t end = std::min(total, begin + kLengths[std::size_t(piece) % 5]);
      if (piece % kNumThreads == thread_idx) body(context, begin, end);
      begin = end;
    }
  };
  std::vector<std::thread> threads;
  for (std::int64_t idx = 1; idx < kNumThreads; ++idx) threads.emplace_back(run_one, idx);
  run_one(0);
  for (std::thread& thread : threads) thread.join();
}

template <int kNumThreads>
inline constexpr Parallel kThreads{&run_threads<kNumThreads>};

}  // namespace tradewind
