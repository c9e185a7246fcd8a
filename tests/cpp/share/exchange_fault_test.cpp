// Ranks that are lost, late or end at any moment: everyone else has an error that says so, soon.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>

#include "share/exchange_ranks.h"

namespace tradewind {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Far above what any of this takes (sanitizers on a busy machine), far below any deadline.
constexpr std::chrono::seconds kPromptly{20};

ExchangeCase small_case(int num_ranks) {
  ExchangeCase input;
  input.num_ranks = num_ranks;
  input.mailbox.longest_delay = microseconds(200);
  input.options.deadline = std::chrono::minutes(5);
  input.channel_bytes = {std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks), 100)};
  return input;
}

void run_round(ExchangeRanks& ranks, Exchange& exchange, int rank, int round) {
  exchange.tell("computes");
  exchange.begin(ranks.size());
  ranks.fill(rank, round);
  for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange.ready(bucket);
  exchange.publish(0, std::vector<std::byte>(100));
  exchange.wait_all();
  (void)exchange.published(0, rank);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
    return error.what();
  }
  return "";
}

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected '" << part << "' in: " << text;
}

// Every call that waits says the same from then on.
void expect_stays_failed(Exchange& exchange, const std::string& reason) {
  EXPECT_EQ(error_of([&] { exchange.begin(1); }), reason);
  EXPECT_EQ(error_of([&] { exchange.wait(0); }), reason);
  EXPECT_EQ(error_of([&] { exchange.wait_all(); }), reason);
  EXPECT_EQ(error_of([&] { exchange.wait_summed(); }), reason);
  EXPECT_EQ(error_of([&] { (void)exchange.is_done(0); }), reason);
  EXPECT_EQ(error_of([&] { exchange.publish(0, std::vector<std::byte>(100)); }), reason);
  exchange.ready(0);
  exchange.release();
  exchange.fail_with("another reason");
  EXPECT_EQ(error_of([&] { exchange.wait_all(); }), reason);
}

// --- lost ranks
// -------------------------------------------------------------------------------------

struct Loss {
  std::string name;
  std::uint32_t kind;  // of the message that breaks the rank: 1 scatter, 2 gather, 3 publish
  int nth;
};

void PrintTo(const Loss& loss, std::ostream* out) { *out << loss.name; }

class LostRank : public testing::TestWithParam<std::tuple<int, Loss>> {};

TEST_P(LostRank, IsAnErrorOnEveryRankThatNamesARank) {
  const auto& [num_ranks, loss] = GetParam();
  ExchangeRanks ranks(small_case(num_ranks));
  const int lost = num_ranks - 1;
  ranks.network().break_at(lost, loss.kind, loss.nth);
  std::barrier all_joined(num_ranks);
  run_ranks(num_ranks, [&](int rank) {
    const auto exchange = ranks.join(rank);
    all_joined.arrive_and_wait();
    const auto start = Clock::now();
    const std::string reason = error_of([&] {
      for (int round = 0; round < 1000; ++round) run_round(ranks, *exchange, rank, round);
    });
    EXPECT_LT(Clock::now() - start, kPromptly);
    expect_has(reason, "rank " + std::to_string(rank) + ": lost rank ");
    if (num_ranks == 2) expect_has(reason, "lost rank " + std::to_string(1 - rank));
    expect_stays_failed(*exchange, reason);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, LostRank,
    testing::Combine(testing::Values(2, 3, 4),
                     testing::Values(Loss{"first_scatter", 1, 1}, Loss{"scatter", 1, 17},
                                     Loss{"gather", 2, 2}, Loss{"last_gather", 2, 25},
                                     Loss{"publish", 3, 1}, Loss{"later_publish", 3, 5})),
    [](const auto& info) {
      return std::get<1>(info.param).name + "_of_" + std::to_string(std::get<0>(info.param));
    });

TEST(ExchangeFault, ARankThatWasLostBeforeIsAnErrorAtOnce) {
  ExchangeRanks ranks(small_case(2));
  ranks.network().break_rank(1);
  expect_has(error_of([&] { ranks.join(0); }), "rank 0: lost rank 1");
}

// Whatever the moment: between calls, in a wait, while posting.
TEST(ExchangeFault, AConnectionMayBreakAtAnyMoment) {
  for (int trial = 0; trial < 40; ++trial) {
    ExchangeRanks ranks(small_case(3));
    std::atomic<int> num_ended = 0;
    std::thread breaker([&] {
      std::this_thread::sleep_for(microseconds(1000 + trial * 331));
      ranks.network().break_rank(trial % 3);
    });
    run_ranks(3, [&](int rank) {
      std::unique_ptr<Exchange> exchange;
      const std::string reason = error_of([&] {
        exchange = ranks.join(rank);
        for (int round = 0; round < 1000; ++round) run_round(ranks, *exchange, rank, round);
      });
      EXPECT_NE(reason, "");
      ++num_ended;
    });
    breaker.join();
    EXPECT_EQ(num_ended, 3);
  }
}

// --- late ranks
// -------------------------------------------------------------------------------------

TEST(ExchangeFault, ALateRankIsNamedByTheDeadlineWithWhatItSaidLast) {
  ExchangeCase input = small_case(3);
  input.options.patience = milliseconds(150);
  input.options.deadline = milliseconds(1500);
  ExchangeRanks ranks(input);
  std::atomic<bool> is_over = false;
  run_ranks(3, [&](int rank) {
    std::atomic<int> num_late = 0;
    std::string late;
    Exchange::Callbacks callbacks;
    callbacks.on_late = [&](const std::string& line) {
      late = line;
      ++num_late;
    };
    auto exchange = ranks.join(rank, callbacks);
    run_round(ranks, *exchange, rank, 0);
    if (rank == 2) {
      exchange->tell("reads a file");
      exchange->begin(3);
      while (!is_over) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_NE(error_of([&] { exchange->wait_all(); }), "");
      return;
    }
    // Its line is on the board by then.
    while (ranks.board().line(2).find("reads a file") == std::string::npos) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    const auto start = Clock::now();
    const std::string reason = error_of([&] { run_round(ranks, *exchange, rank, 1); });
    const auto waited = Clock::now() - start;
    is_over = true;
    EXPECT_LT(waited, kPromptly);
    // The first rank to end names the late one; the other may see that one end, and why.
    expect_has(reason, "The deadline of 1.5 s is over");
    expect_has(reason, "rank 2 did not arrive");
    if (reason.starts_with("rank " + std::to_string(rank) + " has waited ")) {
      expect_has(reason, "rank 2 said last: round 2, reads a file");
      EXPECT_GE(waited, milliseconds(1500));
    } else {
      expect_has(reason, "lost rank " + std::to_string(1 - rank));
    }
    expect_stays_failed(*exchange, reason);
    exchange.reset();  // nothing is called any more
    EXPECT_EQ(num_late, 1);
    expect_has(late, "rank 2 did not arrive");
    expect_has(late, "It goes on waiting until 1.5 s");
  });
}

TEST(ExchangeFault, EveryLateWaitHasItsLine) {
  ExchangeCase input = small_case(2);
  input.options.patience = milliseconds(120);
  ExchangeRanks ranks(input);
  std::atomic<int> num_late = 0;
  run_ranks(2, [&](int rank) {
    Exchange::Callbacks callbacks;
    if (rank == 0) callbacks.on_late = [&](const std::string&) { ++num_late; };
    const auto exchange = ranks.join(rank, callbacks);
    exchange->begin(2);
    ranks.fill(rank, 0);
    for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) {
      if (rank == 1 && bucket < 3) std::this_thread::sleep_for(milliseconds(500));
      exchange->ready(bucket);
    }
    exchange->publish(0, std::vector<std::byte>(100));
    for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange->wait(bucket);
  });
  EXPECT_EQ(num_late, 3);
}

// --- told to fail
// -----------------------------------------------------------------------------------

TEST(ExchangeFault, AReasonOfOneRankReachesAll) {
  for (int trial = 0; trial < 20; ++trial) {
    ExchangeRanks ranks(small_case(3));
    std::barrier all_joined(3);
    run_ranks(3, [&](int rank) {
      const auto exchange = ranks.join(rank);
      all_joined.arrive_and_wait();
      std::thread failing;
      if (rank == 1) {
        failing = std::thread([&exchange, trial] {
          std::this_thread::sleep_for(microseconds(trial * 500));
          exchange->fail_with("no space left on device");
        });
      }
      const std::string reason = error_of([&] {
        for (int round = 0; round < 1000; ++round) run_round(ranks, *exchange, rank, round);
      });
      if (failing.joinable()) failing.join();
      expect_has(reason, "no space left on device");
      EXPECT_EQ(reason == "no space left on device", rank == 1);
      expect_stays_failed(*exchange, reason);
    });
  }
}

TEST(ExchangeFault, AReasonMayBeEmpty) {
  ExchangeRanks ranks(small_case(2));
  const auto exchange = ranks.join(0);
  exchange->fail_with("");
  EXPECT_EQ(error_of([&] { exchange->begin(1); }), "the exchange was ended");
}

TEST(ExchangeFault, OneRankFailsLikeMany) {
  ExchangeRanks ranks(small_case(1));
  const auto exchange = ranks.join(0);
  run_round(ranks, *exchange, 0, 0);
  exchange->fail_with("told so");
  EXPECT_EQ(error_of([&] { exchange->begin(1); }), "told so");
}

// --- ends
// -------------------------------------------------------------------------------------------

// Neither hangs nor crashes, whatever is under way; peers have an error or all they need.
void end_at(int moment) {
  ExchangeCase input = small_case(3);
  input.mailbox.seed = static_cast<std::uint64_t>(moment);
  input.mailbox.is_rendezvous = moment % 2 == 0;
  ExchangeRanks ranks(input);
  std::barrier all_joined(3);
  run_ranks(3, [&](int rank) {
    auto exchange = ranks.join(rank);
    all_joined.arrive_and_wait();
    if (rank > 0) {
      EXPECT_NE(error_of([&] {
                  for (int round = 0; round < 1000; ++round) {
                    run_round(ranks, *exchange, rank, round);
                  }
                }),
                "");
      return;
    }
    if (moment > 0) run_round(ranks, *exchange, rank, 0);
    if (moment > 1) exchange->begin(3);
    for (int bucket = 0; bucket < std::min(moment - 2, ranks.num_buckets()); ++bucket) {
      exchange->ready(bucket);
    }
    if (moment > 7) exchange->publish(0, std::vector<std::byte>(100));
    if (moment > 9) exchange->fail_with("ended");
    if (moment > 10) std::this_thread::sleep_for(milliseconds(20));
    exchange.reset();
  });
}

// All at once, as each waits for a goodbye that does not come.
TEST(ExchangeFault, AnEndMayComeAtAnyMoment) {
  std::vector<std::thread> trials;
  for (int moment = 0; moment < 12; ++moment) trials.emplace_back(end_at, moment);
  for (std::thread& trial : trials) trial.join();
}

TEST(ExchangeFault, AllMayEndBeforeTheFirstRound) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    ExchangeRanks ranks(small_case(num_ranks));
    const auto start = Clock::now();
    run_ranks(num_ranks, [&](int rank) { ranks.join(rank); });
    // Each hears the others' goodbyes, so that nobody waits as long as for one that is silent.
    EXPECT_LT(Clock::now() - start, milliseconds(1900));
  }
}

TEST(ExchangeFault, AnEndInARoundWaitsForNobodyForLong) {
  ExchangeRanks ranks(small_case(2));
  auto silent = ranks.join(1);
  auto exchange = ranks.join(0);
  exchange->begin(2);
  for (std::int32_t bucket = 0; bucket < ranks.num_buckets(); ++bucket) exchange->ready(bucket);
  const auto start = Clock::now();
  exchange.reset();
  EXPECT_LT(Clock::now() - start, kPromptly);
  EXPECT_NE(error_of([&] {
              silent->begin(2);
              silent->ready(0);
              silent->wait_all();
            }),
            "");
}

}  // namespace
}  // namespace tradewind
