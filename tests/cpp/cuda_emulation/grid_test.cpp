// The emulation itself: what it would not find, no test of the kernels would.
#include "cuda_emulation/grid.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

#include "cuda_emulation/cuda_runtime.h"

namespace cuda_emulation {
namespace {

class Grid : public testing::Test {
 protected:
  void SetUp() override {
    failure().clear();
    counts() = {};
    set_order(0);
  }
  void TearDown() override { failure().clear(); }
};

TEST_F(Grid, RunsEachThreadOfEachBlockOnce) {
  for (const std::uint64_t seed : {0, 1, 2}) {
    set_order(seed);
    std::vector<int> visits(3 * 64);
    EXPECT_EQ(launch(3, 64, 0, [&] { ++visits[blockIdx.x * blockDim.x + threadIdx.x]; }), 0);
    EXPECT_EQ(visits, std::vector<int>(3 * 64, 1));
  }
  EXPECT_EQ(counts().launches, 3);
}

TEST_F(Grid, ASeedShufflesTheOrder) {
  std::set<std::vector<unsigned>> orders;
  for (const std::uint64_t seed : {0, 1, 2}) {
    set_order(seed);
    std::vector<unsigned> order;
    EXPECT_EQ(launch(1, 64, 0, [&] { order.push_back(threadIdx.x); }), 0);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 3U);
}

TEST_F(Grid, ThreadsMeetAtABarrier) {
  for (const std::uint64_t seed : {0, 7}) {
    set_order(seed);
    std::vector<unsigned> sums;
    EXPECT_EQ(launch(2, 96, 96 * sizeof(unsigned),
                     [&] {
                       auto* shared = static_cast<unsigned*>(shared_memory());
                       for (unsigned round = 0; round < 3; ++round) {
                         shared[threadIdx.x] = threadIdx.x + round;
                         __syncthreads();
                         if (threadIdx.x == 40) {
                           sums.push_back(std::accumulate(shared, shared + 96, 0U));
                         }
                         __syncthreads();
                       }
                     }),
              0);
    EXPECT_EQ(sums, (std::vector<unsigned>{4560, 4656, 4752, 4560, 4656, 4752}));
  }
}

// With the second sync left out, a thread overwrites what another has yet to read.
TEST_F(Grid, AMissingSyncChangesTheResultInSomeOrder) {
  const auto neighbours_sum = [](std::uint64_t seed) {
    set_order(seed);
    unsigned sum = 0;
    EXPECT_EQ(launch(1, 64, 64 * sizeof(unsigned),
                     [&] {
                       auto* shared = static_cast<unsigned*>(shared_memory());
                       for (unsigned round = 0; round < 2; ++round) {
                         shared[threadIdx.x] = threadIdx.x << round;
                         __syncthreads();
                         sum += shared[(threadIdx.x + 1) % 64] * (threadIdx.x + 1);
                       }
                     }),
              0);
    return sum;
  };
  std::set<unsigned> sums;
  for (const std::uint64_t seed : {0, 1, 2}) sums.insert(neighbours_sum(seed));
  EXPECT_GT(sums.size(), 1U);
}

TEST_F(Grid, WarpsExchangeValues) {
  for (const std::uint64_t seed : {0, 3}) {
    set_order(seed);
    std::vector<std::int64_t> sums(64);
    std::vector<double> last(64);
    std::vector<unsigned> votes(64);
    EXPECT_EQ(launch(1, 64, 0,
                     [&] {
                       const unsigned t = threadIdx.x;
                       std::int64_t sum = t;
                       for (int width = 16; width > 0; width /= 2) {
                         sum += __shfl_xor_sync(0xFFFFFFFFU, sum, width);
                       }
                       sums[t] = sum;
                       last[t] = __shfl_down_sync(0xFFFFFFFFU, 0.5 * t, 1U);
                       votes[t] = __ballot_sync(0xFFFFFFFFU, t % 3 == 0 ? 1 : 0);
                     }),
              0);
    EXPECT_EQ(sums[0], 496);
    EXPECT_EQ(sums[31], 496);
    EXPECT_EQ(sums[32], 1520);
    EXPECT_EQ(last[4], 2.5);
    EXPECT_EQ(last[31], 15.5);  // beyond the warp: its own
    EXPECT_EQ(votes[0], 0x49249249U);
    EXPECT_EQ(votes[63], 0x92492492U);
    EXPECT_EQ(__popc(votes[0]), 11);
  }
}

TEST_F(Grid, ABarrierThatSomeThreadsNeverReachFails) {
  const auto diverging = [] {
    if (threadIdx.x != 5) __syncthreads();
  };
  EXPECT_EQ(launch(2, 64, 0, diverging), kLaunchFailure);
  EXPECT_NE(failure().find("63 threads wait at __syncthreads"), std::string::npos) << failure();
  EXPECT_NE(failure().find("1 have finished"), std::string::npos) << failure();
  // As after a fault on a device, nothing runs until it is cleared.
  EXPECT_EQ(launch(1, 32, 0, [] {}), kLaunchFailure);
  failure().clear();
  int num_run = 0;
  EXPECT_EQ(launch(1, 64, 0, [&] { ++num_run; }), 0);
  EXPECT_EQ(num_run, 64);
}

TEST_F(Grid, AWarpsOperationWithoutAllItsLanesFails) {
  EXPECT_EQ(launch(1, 32, 0,
                   [] {
                     if (threadIdx.x < 31) __ballot_sync(0xFFFFFFFFU, 1);
                   }),
            kLaunchFailure);
  EXPECT_NE(failure().find("31 at a warp's operation"), std::string::npos) << failure();
  failure().clear();
  EXPECT_EQ(launch(1, 32, 0, [] { __ballot_sync(0xFFFFU, 1); }), kLaunchFailure);
  EXPECT_NE(failure().find("without all of its lanes"), std::string::npos) << failure();
}

TEST_F(Grid, LanesThatMeetAtDifferentOperationsFail) {
  EXPECT_EQ(launch(1, 32, 0,
                   [] {
                     if (threadIdx.x % 2 == 0) {
                       __ballot_sync(0xFFFFFFFFU, 1);
                     } else {
                       __shfl_xor_sync(0xFFFFFFFFU, 1, 1);
                     }
                   }),
            kLaunchFailure);
  EXPECT_NE(failure().find("different operations"), std::string::npos) << failure();
}

TEST_F(Grid, AccessesAreCountedAndTheirAlignmentChecked) {
  alignas(16) float values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto copy = [&](std::size_t from) {
    return launch(1, 32, 0, [&, from] {
      if (threadIdx.x != 0) return;
      store(&values[0], load(&values[from]));
      store(reinterpret_cast<uint4*>(values), load(reinterpret_cast<uint4*>(&values[from])));
    });
  };
  EXPECT_EQ(copy(4), 0);
  EXPECT_EQ(values[3], 8);
  EXPECT_EQ(counts().loaded_bytes, 20);
  EXPECT_EQ(counts().stored_bytes, 20);
  EXPECT_EQ(copy(3), kLaunchFailure);
  EXPECT_NE(failure().find("16 bytes at an address that ends in 12"), std::string::npos)
      << failure();
}

TEST_F(Grid, WrongSizesAreRefused) {
  EXPECT_NE(launch(1, 33, 0, [] {}), 0);
  EXPECT_NE(launch(1, 0, 0, [] {}), 0);
  EXPECT_NE(launch(1, 32, 49 * 1024, [] {}), 0);
  EXPECT_EQ(failure(), "");
}

}  // namespace
}  // namespace cuda_emulation
