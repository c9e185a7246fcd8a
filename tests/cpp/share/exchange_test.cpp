#include "share/exchange.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>

#include "base/error_matching.h"
#include "share/exchange_ranks.h"

namespace tradewind {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::byte kPoison{0xB5};

bool is_all(const Arenas& arenas, std::byte value) {
  return std::all_of(arenas.begin(), arenas.end(), [&](const auto& arena) {
    return arena.front() == value &&
           std::memcmp(arena.data(), arena.data() + 1, arena.size() - 1) == 0;
  });
}

void sleep_a_moment(SplitMix& random) {
  if (random.below(3) == 0) std::this_thread::sleep_for(microseconds(random.below(400)));
}

// --- means
// ------------------------------------------------------------------------------------------

struct MeansCase {
  std::string name;
  int num_ranks;
  std::vector<DType> dtypes;
  bool is_urgent;
  std::int64_t window_bytes, lead_bytes;
  microseconds longest_delay;
  bool is_rendezvous = true;
  double bytes_per_s = 0.0;
};

void PrintTo(const MeansCase& made, std::ostream* out) { *out << made.name; }

std::vector<MeansCase> means_cases() {
  const std::vector<DType> all{DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kFloat16};
  const std::vector<DType> plain{DType::kFloat32};
  std::vector<MeansCase> cases;
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    const std::string of = "_of_" + std::to_string(num_ranks);
    constexpr std::int64_t kLarge = std::int64_t{1} << 40;
    cases.push_back({"plain" + of, num_ranks, plain, false, 1 << 20, 1 << 20, {}});
    cases.push_back({"dtypes" + of, num_ranks, all, false, 1 << 20, 1 << 20, {}});
    cases.push_back({"late" + of, num_ranks, plain, false, kLarge, kLarge, microseconds(900)});
    cases.push_back(
        {"eager" + of, num_ranks, all, true, kLarge, 1 << 18, microseconds(300), false});
    cases.push_back(
        {"urgent" + of, num_ranks, plain, true, 1 << 16, 1 << 16, microseconds(500), true, 3e8});
    cases.push_back({"tiny" + of, num_ranks, plain, true, 1, 1, microseconds(100)});
  }
  return cases;
}

class Means : public testing::TestWithParam<MeansCase> {
 protected:
  static constexpr int kNumRounds = 5;

  [[nodiscard]] ExchangeCase input() const {
    ExchangeCase made;
    made.num_ranks = GetParam().num_ranks;
    made.specs = sample_slots(GetParam().dtypes);
    made.options.window_bytes = GetParam().window_bytes;
    made.options.lead_bytes = GetParam().lead_bytes;
    made.options.deadline = std::chrono::minutes(1);
    made.mailbox.longest_delay = GetParam().longest_delay;
    made.mailbox.is_rendezvous = GetParam().is_rendezvous;
    made.mailbox.bytes_per_s = GetParam().bytes_per_s;
    return made;
  }
};

// Half of the buckets from another thread, as from those of backward.
void make_ready(Exchange& exchange, std::int32_t num_buckets, std::uint64_t seed) {
  const std::vector<std::int32_t> buckets = shuffled_buckets(num_buckets, seed);
  const auto part = [&](std::size_t first) {
    SplitMix random(seed + first);
    for (std::size_t i = first; i < buckets.size(); i += 2) {
      sleep_a_moment(random);
      exchange.ready(buckets[i]);
    }
  };
  std::thread other(part, 1);
  part(0);
  other.join();
}

TEST_P(Means, AreTheSumInTheOrderOfRanksToTheBit) {
  ExchangeRanks ranks(input());
  const auto contributors = [&](int round) { return std::max(1, ranks.size() - round % 2); };
  std::vector<std::vector<Arenas>> results(static_cast<std::size_t>(ranks.size()));
  run_ranks(ranks.size(), [&](int rank) {
    const auto exchange = ranks.join(rank);
    SplitMix random(static_cast<std::uint64_t>(rank));
    for (int round = 0; round < kNumRounds; ++round) {
      const auto seed = static_cast<std::uint64_t>(round * 100);
      // The same on all ranks, while readiness is not.
      const auto order = shuffled_buckets(ranks.num_buckets(), seed);
      exchange->set_order(order, GetParam().is_urgent && round % 3 != 2
                                     ? shuffled_buckets(ranks.num_buckets(), seed + 1)
                                     : std::vector<std::int32_t>{});
      exchange->begin(contributors(round));
      ranks.fill(rank, round);
      make_ready(*exchange, ranks.num_buckets(), seed + 2 + static_cast<std::uint64_t>(rank));
      if (round % 2 == 0) {
        for (const std::int32_t bucket : shuffled_buckets(ranks.num_buckets(), seed + 9)) {
          exchange->wait(bucket);
          EXPECT_TRUE(exchange->is_done(bucket));
        }
      }
      if (round == 3) exchange->wait_summed();
      exchange->wait_all();
      Arenas& gradients = ranks.gradients(rank);
      results[static_cast<std::size_t>(rank)].push_back(gradients);
      // What is left to be sent of this round, or comes too early of the next, would be wrong.
      fill_all(gradients, kPoison);
      sleep_a_moment(random);
      EXPECT_TRUE(is_all(gradients, kPoison));
    }
  });
  for (int round = 0; round < kNumRounds; ++round) {
    const Arenas expected = ranks.means(round, ranks.size() == 1 ? 1 : contributors(round));
    for (int rank = 0; rank < ranks.size(); ++rank) {
      EXPECT_TRUE(ranks.are_equal(
          results[static_cast<std::size_t>(rank)].at(static_cast<std::size_t>(round)), expected))
          << "rank " << rank << ", round " << round;
    }
  }
}

TEST_P(Means, ABeginWaitsForWhatIsLeft) {
  ExchangeRanks ranks(input());
  std::vector<Arenas> results(static_cast<std::size_t>(ranks.size()));
  run_ranks(ranks.size(), [&](int rank) {
    const auto exchange = ranks.join(rank);
    for (int round = 0; round < 3; ++round) {
      exchange->begin(ranks.size());
      results[static_cast<std::size_t>(rank)] = ranks.gradients(rank);
      ranks.fill(rank, round);
      make_ready(*exchange, ranks.num_buckets(), static_cast<std::uint64_t>(round + rank));
    }
  });
  for (const Arenas& result : results) {
    EXPECT_TRUE(ranks.are_equal(result, ranks.means(1, ranks.size())));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Means, testing::ValuesIn(means_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(Exchange, AnOrderWithoutBucketsIsARoundLikeAnyOther) {
  ExchangeCase input;
  input.specs = {{"empty", {0}, DType::kFloat32}};
  ExchangeRanks ranks(input);
  run_ranks(2, [&](int rank) {
    const auto exchange = ranks.join(rank);
    for (int round = 0; round < 3; ++round) {
      exchange->begin(2);
      exchange->wait_summed();
      exchange->wait_all();
    }
  });
}

// --- what owners make of means
// ----------------------------------------------------------------------

// Each mean cut to bfloat16.
void cut_shard(const ExchangeRanks& ranks, std::int32_t piece_idx, int rank, const Arenas& means,
               const Layout& second, Arenas& gathered) {
  const PlanPiece& piece = ranks.plan().pieces()[static_cast<std::size_t>(piece_idx)];
  const auto r = static_cast<std::size_t>(rank);
  for (const SlotRun& run : runs_between(ranks.layout(), piece.cuts[r], piece.cuts[r + 1])) {
    const auto s = static_cast<std::size_t>(run.slot_idx);
    const auto* from =
        reinterpret_cast<const float*>(means[0].data() + ranks.layout().slots()[s].offset_bytes);
    auto* to =
        reinterpret_cast<std::uint16_t*>(gathered[0].data() + second.slots()[s].offset_bytes);
    for (std::int64_t i = run.begin; i < run.end; ++i) {
      to[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(from[i]) >> 16U);
    }
  }
}

enum class Released : std::uint8_t { kBeforeReadiness, kInTheMiddle, kAfterTheSums };

class Release : public testing::TestWithParam<std::tuple<int, Released, bool>> {};

TEST_P(Release, WhatOwnersMakeOfTheirShardsReachesAll) {
  const auto [num_ranks, released, is_urgent] = GetParam();
  ExchangeCase input;
  input.num_ranks = num_ranks;
  input.mailbox.longest_delay = microseconds(200);
  input.options.lead_bytes = 1 << 17;
  ExchangeRanks ranks(input);
  const Layout second = Layout::make(sample_slots({DType::kBFloat16}));
  std::vector<Arenas> gathered(static_cast<std::size_t>(num_ranks), arenas_of(second));
  std::vector<Arenas> expected(4, arenas_of(second));
  for (std::size_t round = 0; round < expected.size(); ++round) {
    const Arenas means = ranks.means(static_cast<int>(round), num_ranks);
    for (std::int32_t piece = 0; piece < static_cast<std::int32_t>(ranks.plan().pieces().size());
         ++piece) {
      for (int owner = 0; owner < num_ranks; ++owner) {
        cut_shard(ranks, piece, owner, means, second, expected[round]);
      }
    }
  }
  run_ranks(num_ranks, [&, released = released, is_urgent = is_urgent](int rank) {
    Arenas& own = gathered[static_cast<std::size_t>(rank)];
    std::atomic<bool> is_released = false;
    std::atomic<int> num_sums = 0, num_released = 0, num_all = 0;
    Exchange::Callbacks callbacks;
    callbacks.on_sum = [&](std::int32_t) { ++num_sums; };
    callbacks.on_release = [&](std::int32_t piece_idx) {
      EXPECT_TRUE(is_released);
      ++num_released;
      cut_shard(ranks, piece_idx, rank, ranks.gradients(rank), second, own);
    };
    callbacks.on_all_summed = [&] { ++num_all; };
    const auto exchange = ranks.join(rank, callbacks, memory_of(second, own));
    const auto release = [&] {
      is_released = true;
      exchange->release();
    };
    for (int round = 0; round < 4; ++round) {
      exchange->set_order(
          shuffled_buckets(ranks.num_buckets(), 5),
          is_urgent ? shuffled_buckets(ranks.num_buckets(), 6) : std::vector<std::int32_t>{});
      exchange->begin(ranks.size());
      ranks.fill(rank, round);
      if (released == Released::kBeforeReadiness) release();
      for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) {
        exchange->ready(bucket);
        if (released == Released::kInTheMiddle && bucket == ranks.num_buckets() / 2) release();
      }
      exchange->wait_summed();
      EXPECT_EQ(num_sums, static_cast<int>(ranks.plan().pieces().size()) * (round + 1));
      if (released == Released::kAfterTheSums) release();
      exchange->wait_all();
      EXPECT_EQ(num_released, static_cast<int>(ranks.plan().pieces().size()) * (round + 1));
      const Arenas& wanted = expected[static_cast<std::size_t>(round)];
      for (const Slot& slot : second.slots()) {
        const auto* begin = own[0].data() + slot.offset_bytes;
        EXPECT_TRUE(
            std::equal(begin, begin + slot.size_bytes(), wanted[0].data() + slot.offset_bytes))
            << slot.name << ", rank " << rank << ", round " << round;
      }
      is_released = false;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Release,
                         testing::Combine(testing::Values(1, 2, 3),
                                          testing::Values(Released::kBeforeReadiness,
                                                          Released::kInTheMiddle,
                                                          Released::kAfterTheSums),
                                          testing::Bool()));

// --- channels
// ---------------------------------------------------------------------------------------

std::vector<std::byte> message(std::size_t num_bytes, int rank, int round, int channel) {
  std::vector<std::byte> bytes(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    bytes[i] = static_cast<std::byte>(
        i * 7 + static_cast<std::size_t>(rank * 50 + round * 11 + channel * 3));
  }
  return bytes;
}

void check_message(Exchange& exchange, const ExchangeCase& input, int round, int channel) {
  for (int peer = 0; peer < input.num_ranks; ++peer) {
    const auto& bytes = input.channel_bytes[static_cast<std::size_t>(channel)];
    const auto expected = message(static_cast<std::size_t>(bytes[static_cast<std::size_t>(peer)]),
                                  peer, round, channel);
    const auto got = exchange.published(channel, peer);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin(), expected.end()))
        << "of rank " << peer << ", round " << round << ", channel " << channel;
  }
}

// A channel of the step's thread and one of the summing thread. Every third round some ranks read
// nothing and run ahead; others are slow.
void run_channels(int num_ranks, bool is_rendezvous) {
  ExchangeCase input;
  input.num_ranks = num_ranks;
  input.mailbox.longest_delay = microseconds(300);
  input.mailbox.is_rendezvous = is_rendezvous;
  input.channel_bytes = {std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks), 1000), {}};
  for (int rank = 0; rank < num_ranks; ++rank) input.channel_bytes[1].push_back(rank * 300);
  ExchangeRanks ranks(input);
  run_ranks(num_ranks, [&](int rank) {
    const auto own_bytes = [&](int channel) {
      return static_cast<std::size_t>(
          input.channel_bytes[static_cast<std::size_t>(channel)][static_cast<std::size_t>(rank)]);
    };
    Exchange* own = nullptr;
    std::atomic<int> num_rounds = 0;
    Exchange::Callbacks callbacks;
    callbacks.on_all_summed = [&] {
      own->publish(1, message(own_bytes(1), rank, num_rounds++, 1));
    };
    const auto exchange = ranks.join(rank, callbacks);
    own = exchange.get();
    SplitMix random(static_cast<std::uint64_t>(rank));
    for (int round = 0; round < 12; ++round) {
      exchange->begin(ranks.size());
      ranks.fill(rank, round);
      if (rank == 1) sleep_a_moment(random);
      const auto publish = [&] { exchange->publish(0, message(own_bytes(0), rank, round, 0)); };
      if (round % 2 == 0) publish();
      for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) {
        exchange->ready(bucket);
      }
      if (round % 2 != 0) publish();
      if (round % 3 == 2 && rank != 1) continue;
      if (round % 4 == 0) check_message(*exchange, input, round, 0);
      check_message(*exchange, input, round, 1);
      check_message(*exchange, input, round, 0);
    }
    exchange->wait_all();
    check_message(*exchange, input, 11, 0);
  });
}

TEST(Exchange, EveryRankReadsWhatTheOthersPublished) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) run_channels(num_ranks, true);
  run_channels(3, false);
}

TEST(Exchange, AMessageOfAnotherSizeIsRefused) {
  ExchangeCase input;
  input.num_ranks = 1;
  input.channel_bytes = {{10}};
  ExchangeRanks ranks(input);
  const auto exchange = ranks.join(0);
  expect_error(ErrorKind::kBadValue, {"channel 0", "expected 10 bytes", "got 3"},
               [&] { exchange->publish(0, std::vector<std::byte>(3)); });
}

// --- codecs
// ------------------------------------------------------------------------------------------

class Lossy : public testing::TestWithParam<std::tuple<Codec, bool>> {
 protected:
  [[nodiscard]] ExchangeCase input(std::vector<DType> dtypes) const {
    ExchangeCase made;
    made.num_ranks = 3;
    made.specs = sample_slots(dtypes);
    made.options.codec = std::get<0>(GetParam());
    made.options.error_feedback = std::get<1>(GetParam());
    made.mailbox.longest_delay = microseconds(200);
    return made;
  }
  // Of a value below 1, twice: of a part and of the mean.
  [[nodiscard]] double quantum() const {
    const Codec codec = std::get<0>(GetParam());
    return codec == Codec::kInt8 ? 1.0 / 127.0 : codec == Codec::kBfloat16 ? 0x1p-8 : 0x1p-11;
  }
};

TEST_P(Lossy, AllRanksEndWithTheSameBits) {
  ExchangeRanks ranks(input({DType::kFloat32, DType::kBFloat16, DType::kFloat16}));
  constexpr int kNumRounds = 4;
  std::vector<std::vector<Arenas>> results(3);
  run_ranks(3, [&](int rank) {
    const auto exchange = ranks.join(rank);
    EXPECT_EQ(exchange->errors().size(), std::get<1>(GetParam()) ? 3U : 0U);
    for (int round = 0; round < kNumRounds; ++round) {
      exchange->begin(3);
      ranks.fill(rank, round);
      make_ready(*exchange, ranks.num_buckets(), static_cast<std::uint64_t>(round + rank));
      exchange->wait_all();
      results[static_cast<std::size_t>(rank)].push_back(ranks.gradients(rank));
      fill_all(ranks.gradients(rank), kPoison);
    }
  });
  for (std::size_t round = 0; round < kNumRounds; ++round) {
    EXPECT_TRUE(ranks.are_equal(results[0][round], results[1][round])) << round;
    EXPECT_TRUE(ranks.are_equal(results[0][round], results[2][round])) << round;
  }
}

// With feedback what has arrived after many rounds is what was sent, within what is still kept;
// without, each round is off by at most what two roundings lose.
TEST_P(Lossy, FeedbackSendsLaterWhatWasLost) {
  const bool has_feedback = std::get<1>(GetParam());
  ExchangeRanks ranks(input({DType::kFloat32}));
  constexpr int kNumRounds = 12;
  const auto num_elements = ranks.gradients(0)[0].size() / sizeof(float);
  std::vector<double> arrived(num_elements), sent(num_elements);
  run_ranks(3, [&](int rank) {
    const auto exchange = ranks.join(rank);
    for (int round = 0; round < kNumRounds; ++round) {
      exchange->begin(3);
      ranks.fill(rank, 0);
      for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange->ready(bucket);
      exchange->wait_all();
      if (rank != 0) continue;
      const auto* values = reinterpret_cast<const float*>(ranks.gradients(rank)[0].data());
      for (std::size_t i = 0; i < num_elements; ++i) arrived[i] += static_cast<double>(values[i]);
    }
  });
  const Arenas means = ranks.means(0, 3);
  const auto* expected = reinterpret_cast<const float*>(means[0].data());
  double largest = 0.0;
  for (std::size_t i = 0; i < num_elements; ++i) {
    largest =
        std::max(largest, std::abs(arrived[i] / kNumRounds - static_cast<double>(expected[i])));
  }
  // Errors kept are below one quantum each, of sums below twice as large.
  EXPECT_LE(largest, has_feedback ? 4.0 * quantum() / kNumRounds : 2.0 * quantum());
  EXPECT_GT(largest, 0.0);
}

INSTANTIATE_TEST_SUITE_P(All, Lossy,
                         testing::Combine(testing::Values(Codec::kBfloat16, Codec::kFloat16,
                                                          Codec::kInt8),
                                          testing::Bool()),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_with_feedback" : "_without");
                         });

TEST(Exchange, ACodecRefusesWhatItDoesNotTake) {
  ExchangeCase input;
  input.specs = sample_slots({DType::kFloat64});
  input.options.codec = Codec::kInt8;
  ExchangeRanks ranks(input);
  expect_error(ErrorKind::kBadType, {"int8", "float32", "float64"}, [&] { ranks.join(0); });
}

TEST(Exchange, APlanForAnotherWorldIsRefused) {
  const Layout layout = Layout::make(sample_slots({DType::kFloat32}));
  const Plan plan = Plan::make(layout, 3);
  Arenas arenas = arenas_of(layout);
  const auto network = std::make_shared<MailboxNetwork>(2, MailboxOptions{});
  expect_error(ErrorKind::kBadValue, {"plan", "one of 2 ranks", "got one of 3"}, [&] {
    Exchange(plan, memory_of(layout, arenas), memory_of(layout, arenas), network->connect(0),
             nullptr, {}, {}, {});
  });
}

// --- statistics
// -------------------------------------------------------------------------------------

void expect_sent(int num_ranks, Codec codec, std::vector<std::vector<std::int64_t>> channel_bytes) {
  ExchangeCase input;
  input.num_ranks = num_ranks;
  input.options.codec = codec;
  input.channel_bytes = std::move(channel_bytes);
  ExchangeRanks ranks(input);
  constexpr int kNumRounds = 3;
  run_ranks(num_ranks, [&](int rank) {
    const auto exchange = ranks.join(rank);
    for (int round = 0; round < kNumRounds; ++round) {
      exchange->begin(num_ranks);
      EXPECT_EQ(exchange->num_scattered(), 0);
      EXPECT_EQ(exchange->statistics().num_rounds, round + 1);
      for (std::size_t channel = 0; channel < input.channel_bytes.size(); ++channel) {
        const auto bytes = input.channel_bytes[channel][static_cast<std::size_t>(rank)];
        exchange->publish(static_cast<std::int32_t>(channel),
                          std::vector<std::byte>(static_cast<std::size_t>(bytes)));
      }
      for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange->ready(bucket);
      exchange->wait_all();
      // What was published went first, so it has left too.
      EXPECT_EQ(exchange->statistics().sent_bytes, ranks.sent_bytes(rank) * (round + 1));
      EXPECT_EQ(exchange->num_scattered(), static_cast<std::int64_t>(ranks.plan().pieces().size()));
    }
    EXPECT_GT(exchange->statistics().waited_s, 0.0);
  });
}

TEST(Exchange, SendsWhatThePlanSays) {
  expect_sent(2, Codec::kNone, {});
  expect_sent(3, Codec::kNone, {{100, 0, 7}});
  expect_sent(4, Codec::kInt8, {{1, 2, 3, 4}, {5000, 0, 0, 1}});
}

// --- the end
// ----------------------------------------------------------------------------------------

// Some ranks have all they need and are gone while others are still reading.
TEST(Exchange, WhoEndsAtOnceLeavesTheOthersWhole) {
  for (const bool is_rendezvous : {true, false}) {
    for (int num_ranks = 2; num_ranks <= 4; ++num_ranks) {
      ExchangeCase input;
      input.num_ranks = num_ranks;
      input.mailbox.longest_delay = milliseconds(3);
      input.mailbox.is_rendezvous = is_rendezvous;
      input.channel_bytes = {std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks), 100)};
      ExchangeRanks ranks(input);
      const Arenas expected = ranks.means(0, num_ranks);
      run_ranks(num_ranks, [&](int rank) {
        const auto exchange = ranks.join(rank);
        exchange->begin(num_ranks);
        ranks.fill(rank, 0);
        for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) {
          exchange->ready(bucket);
        }
        exchange->publish(0, message(100, rank, 0, 0));
        if (rank > 0) std::this_thread::sleep_for(milliseconds(40 * rank));
        exchange->wait_all();
        check_message(*exchange, input, 0, 0);
        EXPECT_TRUE(ranks.are_equal(ranks.gradients(rank), expected)) << rank;
      });
    }
  }
}

}  // namespace
}  // namespace tradewind
