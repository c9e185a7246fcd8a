#include "base/parallel.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "base/threaded_parallel.h"

namespace tradewind {
namespace {

TEST(Parallel, SerialIsOneRangeOnTheCallingThread) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  const auto caller = std::this_thread::get_id();
  kSerial.for_ranges(1000, 16, [&](std::int64_t begin, std::int64_t end) {
    ranges.emplace_back(begin, end);
    EXPECT_EQ(std::this_thread::get_id(), caller);
  });
  EXPECT_EQ(ranges, (std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1000}}));
}

TEST(Parallel, NothingToDoCallsNobody) {
  kSerial.for_ranges(0, 16, [](std::int64_t, std::int64_t) { ADD_FAILURE(); });
}

TEST(Parallel, CallsTheVeryBodyItWasGiven) {
  struct Counter {
    std::int64_t sum = 0;
    void operator()(std::int64_t begin, std::int64_t end) { sum += end - begin; }
  } counter;
  kSerial.for_ranges(5, 1, counter);
  kSerial.for_ranges(6, 1, counter);
  EXPECT_EQ(counter.sum, 11);
}

TEST(Parallel, TheTestsThreadsCoverEachIndexOnce) {
  for (const Parallel& parallel : {kThreads<1>, kThreads<2>, kThreads<7>}) {
    for (const std::int64_t total : {0, 1, 2, 3, 4, 17, 1000}) {
      std::vector<int> visits(static_cast<std::size_t>(total), 0);
      parallel.for_ranges(total, 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
      });
      EXPECT_EQ(visits, std::vector<int>(static_cast<std::size_t>(total), 1));
    }
  }
}

}  // namespace
}  // namespace tradewind
