#include "share/host_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "base/error.h"
#include "share/forked_ranks.h"
#include "share/neighbours.h"

namespace tradewind {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

const std::string run = std::to_string(getpid());  // of the ranks' parent

// Names that no other test, and no other run of it, uses at this time.
HostLinks::Options options_for(int place, int num_places, const std::string& test,
                               std::chrono::milliseconds patience = seconds(20)) {
  HostLinks::Options options;
  options.own_place = place;
  options.deadline = steady_clock::now() + patience;
  for (int one = 0; one < num_places; ++one) {
    options.ranks.push_back(10 + one);
    options.names.push_back("tradewind-" + run + "-" + test + "-" + std::to_string(one));
  }
  return options;
}

TEST(HostMemory, IsZerosThatBothMappingsWrite) {
  const HostMemory memory(10'000);
  const HostMemory other(dup(memory.file()), 10'000);
  EXPECT_EQ(std::vector<std::byte>(10'000), std::vector(memory.data(), memory.data() + 10'000));
  EXPECT_NE(memory.data(), other.data());
  EXPECT_EQ(other.file(), -1);
  memory.data()[9'999] = std::byte{7};
  EXPECT_EQ(other.data()[9'999], std::byte{7});
}

TEST(HostMemory, CannotBeMadeSmaller) {
  const HostMemory memory(4096);
  EXPECT_NE(ftruncate(memory.file(), 0), 0);
  EXPECT_EQ(errno, EPERM);
}

TEST(HostMemory, OutlivesWhoMadeIt) {
  auto memory = std::make_unique<HostMemory>(4096);
  const HostMemory other(dup(memory->file()), 4096);
  memory->data()[0] = std::byte{3};
  memory.reset();
  EXPECT_EQ(other.data()[0], std::byte{3});
}

TEST(HostMemory, RefusesAFileThatItsOwnerCouldTakeAway) {
  const int file = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(file, 4096), 0);
  EXPECT_THROW(HostMemory(file, 4096), Error);
  EXPECT_EQ(fcntl(file, F_GETFD), -1);  // taken, and closed
}

TEST(HostMemory, RefusesAFileOfAnotherSize) {
  const HostMemory memory(4096);
  EXPECT_THROW(HostMemory(dup(memory.file()), 8192), Error);
}

TEST(HostMemory, NamesTheSizeThatTheSystemRefuses) {
  // Should it be tried after all, the limit ends this test, and not the machine's memory.
  const rlimit limit{1U << 30U, 1U << 30U};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  try {
    const HostMemory memory(std::int64_t{1} << 60);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find(std::to_string(std::int64_t{1} << 60)),
              std::string::npos);
  }
}

TEST(Neighbours, SeeWhatWasWrittenBeforeAWord) {
  run_ranks(3, [](int place, RankReport& report) {
    Neighbours neighbours(options_for(place, 3, "words"), {100, 5000}, 3);
    std::memset(neighbours.arena(place, 1), 1 + place, 5000);
    neighbours.announce(place, 5);
    for (int other = 0; other < 3; ++other) {
      while (other != place && neighbours.word(other, other) < 5) {
        report.expect(neighbours.wait(), "hung up");
      }
      report.expect(neighbours.arena(other, 1)[4999] == static_cast<std::byte>(1 + other),
                    "another value");
      report.expect(neighbours.arena(other, 0)[99] == std::byte{0}, "expected zeros");
    }
    // Nobody leaves before all have seen it.
    neighbours.announce(place, 6);
    for (int other = 0; other < 3; ++other) {
      while (other != place && neighbours.word(other, other) < 6) {
        if (neighbours.is_gone(other)) break;
        report.expect(neighbours.wait() || neighbours.is_gone(other), "hung up");
      }
    }
  });
}

TEST(Neighbours, MayBeWrittenAfterTheyDied) {
  run_ranks(2,
            [](int place, RankReport& report) {
              Neighbours neighbours(options_for(place, 2, "dies"), {1 << 20}, 1);
              if (place == 1) _exit(0);
              while (neighbours.wait()) {
              }
              report.expect(neighbours.is_gone(1), "expected the neighbour to be gone");
              std::memset(neighbours.arena(1, 0), 1, 1 << 20);
              report.expect(neighbours.arena(1, 0)[1000] == std::byte{1}, "expected memory");
            },
            {1});
}

// A child of a neighbour, as a DataLoader's worker is, holds its sockets open.
TEST(Neighbours, AreGoneThoughTheirChildrenLive) {
  run_ranks(2,
            [](int place, RankReport& report) {
              Neighbours neighbours(options_for(place, 2, "child"), {4096}, 1);
              if (place == 1) {
                if (fork() == 0) {
                  sleep(1);
                  _exit(0);
                }
                _exit(0);
              }
              const auto start = steady_clock::now();
              while (neighbours.wait()) {
              }
              report.expect(steady_clock::now() - start < std::chrono::milliseconds(700),
                            "heard of the child's end only");
            },
            {1});
}

TEST(Neighbours, WhoDoNotComeAreNamed) {
  try {
    const Neighbours neighbours(options_for(0, 3, "alone", std::chrono::milliseconds(50)), {1}, 1);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
    EXPECT_NE(std::string(error.what()).find("missing: rank 11, 12"), std::string::npos)
        << error.what();
  }
}

TEST(Neighbours, WhoListenToNobodyAreNamed) {
  try {
    const Neighbours neighbours(options_for(2, 3, "last", std::chrono::milliseconds(50)), {1}, 1);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("missing: rank 10"), std::string::npos);
  }
}

TEST(Neighbours, ManyBellsNeverBlock) {
  run_ranks(2, [](int place, RankReport& report) {
    Neighbours neighbours(options_for(place, 2, "bells"), {4096}, 2);
    // More than a socket holds, and nobody listens.
    for (std::uint64_t value = 1; value <= 20'000; ++value) neighbours.announce(0, value);
    while (neighbours.word(1 - place, 0) < 20'000) {
      report.expect(neighbours.wait(), "hung up");
    }
    neighbours.announce(1, 1);
    while (neighbours.word(1 - place, 1) < 1 && !neighbours.is_gone(1 - place)) {
      (void)neighbours.wait();
    }
  });
}

}  // namespace
}  // namespace tradewind
