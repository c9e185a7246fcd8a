#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>

#include "share/host_ranks.h"

namespace tradewind {
namespace {

using std::chrono::milliseconds;

// Any values, other ones for each rank and round.
float value_at(int rank, int round, std::size_t i) {
  const auto seed = static_cast<std::uint32_t>(rank * 7919 + round * 104729) + i * 2654435761U;
  return static_cast<float>(static_cast<std::int32_t>(seed)) * 1e-6F;
}

// In rank order on every host, then over hosts in the order of their first ranks.
float reference(const Hosts& hosts, int round, std::size_t i) {
  float sum = 0.0F;
  for (int host = 0; host < hosts.num_hosts(); ++host) {
    float host_sum = 0.0F;
    for (const int rank : hosts.ranks_of(host)) {
      const float value = value_at(rank, round, i);
      host_sum = rank == hosts.ranks_of(host).front() ? value : host_sum + value;
    }
    sum = host == 0 ? host_sum : sum + host_sum;
  }
  return sum / static_cast<float>(hosts.num_ranks());
}

HostRanks ranks_on(std::vector<std::string> keys) {
  HostRanks ranks;
  ranks.keys = std::move(keys);
  ranks.slots = {{"first", {70'001}}, {"second", {3}}, {"third", {300, 500}}, {"last", {40'000}}};
  ranks.plan = {256 * 1024, 64 * 1024, 128 * 1024};
  return ranks;
}

void fill(const HostRank& rank, int round) {
  for (std::size_t slot = 0; slot < rank.layout.slots().size(); ++slot) {
    const auto values = rank.values<float>(static_cast<std::int64_t>(slot));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = value_at(rank.rank, round, i + slot);
    }
  }
}

class OnHosts : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(OnHosts, MeansAreThoseOfHostsSums) {
  const HostRanks ranks = ranks_on(GetParam());
  const Hosts hosts = Hosts::make(ranks.keys);
  ranks.run([&](HostRank& rank) {
    std::minstd_rand random(static_cast<unsigned>(rank.rank));
    for (int round = 0; round < 6; ++round) {
      if (random() % 2 == 0) std::this_thread::sleep_for(milliseconds(random() % 5));
      rank.run_round(ranks.size(), [&] { fill(rank, round); });
      std::size_t num_wrong = 0;
      for (std::size_t slot = 0; slot < rank.layout.slots().size(); ++slot) {
        const auto values = rank.values<float>(static_cast<std::int64_t>(slot));
        for (std::size_t i = 0; i < values.size(); ++i) {
          num_wrong += values[i] == reference(hosts, round, i + slot) ? 0 : 1;
        }
        // What comes after the end would spoil the next round.
        std::fill(values.begin(), values.end(), NAN);
      }
      EXPECT_EQ(num_wrong, 0U) << "round " << round << " on rank " << rank.rank;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, OnHosts,
                         testing::Values(std::vector<std::string>{"a", "a", "b", "b"},
                                         std::vector<std::string>{"a", "b", "b", "a"},
                                         std::vector<std::string>{"a", "a", "a", "a"},
                                         std::vector<std::string>{"a", "b", "a", "b", "a", "b"},
                                         std::vector<std::string>{"a", "a", "b", "b", "c", "c"},
                                         std::vector<std::string>{"a", "b"}));

std::int64_t bytes_between_hosts(HostRanks ranks) {
  std::atomic<std::int64_t> total{0};
  ranks.run([&](HostRank& rank) {
    rank.run_round(ranks.size(), [&] { fill(rank, 0); });
    const auto found = rank.exchange->statistics();
    if (rank.rank < 2) total += found.between_hosts_bytes;
    EXPECT_GE(found.sent_bytes, found.between_hosts_bytes);
  });
  return total;
}

TEST(ExchangeOnHosts, SendsEveryGradientOnceToAnotherHost) {
  HostRanks ranks = ranks_on({"a", "a", "b", "b"});
  const std::int64_t gradient_bytes = (70'001 + 3 + 300 * 500 + 40'000) * 4;
  // Slots begin at cache lines, and what is between them travels along.
  EXPECT_NEAR(static_cast<double>(bytes_between_hosts(ranks)), gradient_bytes, 500);
  ranks.is_flat = true;
  EXPECT_NEAR(static_cast<double>(bytes_between_hosts(ranks)), 2 * gradient_bytes, 1000);
  ranks.is_flat = false;
  ranks.keys = {"a", "a", "a", "a"};
  EXPECT_EQ(bytes_between_hosts(ranks), 0);
}

// Whatever travels, all ranks have the same bits, near the mean.
TEST(ExchangeOnHosts, CodecsApplyBetweenHosts) {
  for (const Codec codec : {Codec::kBfloat16, Codec::kFloat16, Codec::kInt8}) {
    HostRanks ranks = ranks_on({"a", "a", "b", "b"});
    ranks.exchange.codec = codec;
    const Hosts hosts = Hosts::make(ranks.keys);
    std::mutex mutex;
    std::vector<std::vector<float>> found(4);
    ranks.run([&](HostRank& rank) {
      for (int round = 0; round < 3; ++round) {
        rank.run_round(4, [&] { fill(rank, round); });
      }
      const auto values = rank.values<float>(2);
      const std::scoped_lock lock(mutex);
      found[static_cast<std::size_t>(rank.rank)].assign(values.begin(), values.end());
    });
    for (const auto& values : found) EXPECT_EQ(values, found[0]);
    for (std::size_t i = 0; i < found[0].size(); i += 97) {
      // int8 loses 1/254 of a block's largest value, 2148, twice; errors of rounds before add to
      // it.
      ASSERT_NEAR(found[0][i], reference(hosts, 2, i + 2), 60.0F) << name_of(codec);
    }
  }
}

TEST(ExchangeOnHosts, OneHostNeedsNoCodec) {
  HostRanks ranks = ranks_on({"a", "a"});
  ranks.exchange.codec = Codec::kInt8;
  const Hosts hosts = Hosts::make(ranks.keys);
  ranks.run([&](HostRank& rank) {
    rank.run_round(2, [&] { fill(rank, 0); });
    const auto values = rank.values<float>();
    for (std::size_t i = 0; i < values.size(); i += 31) {
      ASSERT_EQ(values[i], reference(hosts, 0, i));
    }
    EXPECT_EQ(rank.exchange->statistics().sent_bytes, 0);
  });
}

TEST(ExchangeOnHosts, SumsOf16BitValuesDoNotOverflow) {
  HostRanks ranks = ranks_on({"a", "a", "b", "b"});
  ranks.slots = {{"half", {20'000}, DType::kFloat16}};
  ranks.run([&](HostRank& rank) {
    constexpr std::uint16_t kLargest = 0x7BFF;  // 65504
    const auto values = rank.values<std::uint16_t>();
    rank.run_round(4, [&] { std::fill(values.begin(), values.end(), kLargest); });
    for (const std::uint16_t value : values) ASSERT_EQ(value, kLargest);
  });
}

TEST(ExchangeOnHosts, UrgentBucketsMayBeWaitedForInAnyOrder) {
  const HostRanks ranks = ranks_on({"a", "a", "b", "b"});
  const Hosts hosts = Hosts::make(ranks.keys);
  ranks.run([&](HostRank& rank) {
    const auto num_buckets = static_cast<std::int32_t>(rank.plan.buckets().size());
    std::vector<std::int32_t> order, urgency;
    for (std::int32_t bucket = 0; bucket < num_buckets; ++bucket) {
      order.push_back(num_buckets - 1 - bucket);
      urgency.push_back(num_buckets - bucket);
    }
    rank.exchange->set_order(order, urgency);
    for (int round = 0; round < 4; ++round) {
      rank.exchange->begin(4);
      fill(rank, round);
      for (const std::int32_t bucket : order) rank.exchange->ready(bucket);
      for (std::int32_t bucket = num_buckets - 1; bucket >= 0; --bucket) {
        rank.exchange->wait(bucket);
        EXPECT_TRUE(rank.exchange->is_done(bucket));
      }
      const auto values = rank.values<float>(2);
      for (std::size_t i = 0; i < values.size(); i += 53) {
        ASSERT_EQ(values[i], reference(hosts, round, i + 2));
      }
      rank.exchange->wait_all();
    }
  });
}

// --- failures
// -------------------------------------------------------------------------------------

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
    return error.what();
  }
  return "no error";
}

TEST(ExchangeOnHosts, AFailureOfOneReachesAll) {
  const HostRanks ranks = ranks_on({"a", "a", "b", "b"});
  ranks.run([&](HostRank& rank) {
    rank.run_round(4, [&] { fill(rank, 0); });
    if (rank.rank == 3) rank.exchange->fail_with("rank 3 has had enough");
    const auto start = std::chrono::steady_clock::now();
    const std::string error = error_of([&] { rank.run_round(4, [&] { fill(rank, 1); }); });
    EXPECT_NE(error, "no error") << "rank " << rank.rank;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  });
}

TEST(ExchangeOnHosts, WhoEndsAfterItsLastRoundIsNotMissed) {
  const HostRanks ranks = ranks_on({"a", "a"});
  const Hosts hosts = Hosts::make(ranks.keys);
  for (int repetition = 0; repetition < 20; ++repetition) {
    ranks.run([&](HostRank& rank) {
      rank.run_round(2, [&] { fill(rank, 0); });
      EXPECT_EQ(rank.values<float>()[5], reference(hosts, 0, 5));
      rank.exchange.reset();
    });
  }
}

TEST(ExchangeOnHosts, ALateNeighbourIsNamed) {
  HostRanks ranks = ranks_on({"a", "a", "b", "b"});
  ranks.exchange.patience = milliseconds(100);
  ranks.exchange.deadline = milliseconds(600);
  std::mutex mutex;
  std::vector<std::string> lines;
  ranks.callbacks.on_late = [&](const std::string& line) {
    const std::scoped_lock lock(mutex);
    lines.push_back(line);
  };
  ranks.run([&](HostRank& rank) {
    rank.exchange->begin(4);
    if (rank.rank == 1) {
      std::this_thread::sleep_for(milliseconds(1200));
      return;
    }
    const std::string error = error_of([&] { rank.run_round(4, [] {}); });
    if (rank.rank == 0) {
      EXPECT_NE(error.find("rank 1 did not arrive"), std::string::npos) << error;
    }
    EXPECT_NE(error, "no error");
  });
  EXPECT_TRUE(std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find("rank 0 has waited") == 0 &&
           line.find("rank 1 did not arrive") != std::string::npos;
  }));
}

TEST(ExchangeOnHosts, HostsOfDifferentSizesAreRefused) {
  const Layout layout = Layout::make({{"slot", {8}}});
  const Plan plan = Plan::make(layout, 3);
  EXPECT_THROW(meet_neighbours(layout, plan, Hosts::make({"a", "a", "b"}), {"x", "y", "z"}, 0,
                               std::chrono::steady_clock::now()),
               Error);
}

}  // namespace
}  // namespace tradewind
