// What goes wrong between ranks: every case ends as a named Error in time, on every survivor.
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "share/forked_ranks.h"
#include "share/nccl_comm.h"
#include "share/nccl_standin_control.h"

namespace tradewind {
namespace {

using std::chrono::milliseconds;

int stream_of_test = 0;
void* const kStream = &stream_of_test;

// How late an answer may be on a loaded machine, against the hang that it must not be.
constexpr std::chrono::seconds kGrace{10};

template <class Call>
void expect_in_time(Deadline deadline, RankReport& report, const Call& call) {
  call();
  report.expect(std::chrono::steady_clock::now() < deadline + kGrace, "long after the deadline");
}

void expect_sum(NcclComm& comm, float own, float expected, RankReport& report) {
  comm.all_reduce(&own, &own, 1, DType::kFloat32, Reduction::kSum, kStream);
  comm.wait(kStream, soon());
  report.expect(own == expected, "the sum is " + std::to_string(own));
}

void start_all_reduce(NcclComm& comm, std::vector<float>& data) {
  comm.all_reduce(data.data(), data.data(), static_cast<std::int64_t>(data.size()), DType::kFloat32,
                  Reduction::kSum, kStream);
}

// By which one rank lets another stay, without a call, until it is done. Made before ranks are.
class Stay {
 public:
  Stay() { EXPECT_EQ(pipe(ends_.data()), 0); }
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;
  ~Stay() {
    for (const int end : ends_) close(end);
  }

  void until_done(RankReport& report) const {
    pollfd end{ends_[0], POLLIN, 0};
    report.expect(poll(&end, 1, 60'000) == 1, "the other rank was not done within a minute");
  }
  void done(RankReport& report) const {
    report.expect(write(ends_[1], "", 1) == 1, "the other rank cannot be told");
  }

 private:
  std::array<int, 2> ends_{};
};

TEST(NcclFaults, ARankThatNeverJoinsShowsAtTheDeadline) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(3, [&](int rank, RankReport& report) {
    if (rank == 1) return;
    const Deadline deadline = after(milliseconds(200));
    expect_in_time(deadline, report, [&] {
      report.expect_error(
          ErrorKind::kBadState,
          {"joining the group as rank " + std::to_string(rank) + " of 3", "deadline", "missing"},
          [&] { (void)standin.join(id, rank, 3, deadline); });
    });
  });
}

TEST(NcclFaults, TwoRanksOnOneDeviceAreRefused) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    setenv("NCCL_STANDIN_DEVICE", "5", 1);
    report.expect_error(ErrorKind::kBadState,
                        {"joining the group", "NCCL error 5", "a device of its own"},
                        [&] { (void)standin.join(id, rank, 2, soon()); });
  });
}

TEST(NcclFaults, RanksOnDevicesOfTheirOwnAreNot) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    setenv("NCCL_STANDIN_DEVICE", rank == 0 ? "0" : "1", 1);
    expect_sum(*standin.join(id, rank, 2, soon()), 1.0F, 2.0F, report);
  });
}

TEST(NcclFaults, RanksThatDisagreeAboutTheSizeAreRefused) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    report.expect_error(ErrorKind::kBadState, {"joining the group", "NCCL error 4"},
                        [&] { (void)standin.join(id, rank, rank + 2, soon()); });
  });
}

TEST(NcclFaults, ADeadPeerIsFoundByAllAndTheSurvivorsGoOn) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(4,
            [&](int rank, RankReport& report) {
              std::vector<float> data(3000, 1.0F);
              const auto comm = standin.join(id, rank, 4, soon());
              expect_sum(*comm, 1.0F, 4.0F, report);
              if (rank == 1) raise(SIGKILL);
              const Deadline deadline = soon();
              expect_in_time(deadline - std::chrono::seconds(20), report, [&] {
                report.expect_error(ErrorKind::kBadState,
                                    {"all_reduce of 3000 float32 (12000 bytes) on rank " +
                                         std::to_string(rank) + " of 4",
                                     "NCCL error 6", "remote process exited", "abort"},
                                    [&] {
                                      start_all_reduce(*comm, data);  // where it may show already
                                      comm->wait(kStream, deadline);
                                    });
              });
              const auto survivors = comm->shrink({1}, soon());
              report.expect(survivors->size() == 3, "three are left");
              report.expect(survivors->rank() == (rank == 0 ? 0 : rank - 1), "in the same order");
              report.expect(standin.stream_is_done(kStream) != 0, "the old work was given up");
              expect_sum(*survivors, static_cast<float>(rank), 5.0F, report);
              survivors->barrier(kStream, soon());
              report.expect_error(ErrorKind::kBadState, {"was aborted"}, [&] { comm->check(); });
              survivors->close(soon());
              report.expect(standin.num_misuses() == 0, "the stand-in found misuse");
            },
            {1});
}

TEST(NcclFaults, AGroupShrinksTwice) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(4, [&](int rank, RankReport& report) {
    const auto four = standin.join(id, rank, 4, soon());
    if (rank == 0) return;
    const auto three = four->shrink({0}, soon());
    expect_sum(*three, static_cast<float>(rank), 6.0F, report);
    if (rank == 3) return;
    const auto two = three->shrink({2}, soon());
    expect_sum(*two, static_cast<float>(rank), 3.0F, report);
    two->close(soon());
  });
}

TEST(NcclFaults, APeerThatDiesInTheMiddleIsFound) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(3,
            [&](int rank, RankReport& report) {
              std::vector<float> data(20000, 1.0F);  // for as long as the communicator's thread
              const auto comm = standin.join(id, rank, 3, soon());
              if (rank == 2) standin.die_after_chunks(7);
              report.expect_error(ErrorKind::kBadState, {"all_reduce of 20000", "NCCL error 6"},
                                  [&] {
                                    start_all_reduce(*comm, data);  // where it may show already
                                    comm->wait(kStream, soon());
                                  });
            },
            {2});
}

TEST(NcclFaults, ARankThatDoesNotCallShowsAtTheDeadline) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  const Stay stay;
  run_ranks(2, [&](int rank, RankReport& report) {
    std::vector<float> data(4, 1.0F);
    const auto comm = standin.join(id, rank, 2, soon());
    if (rank == 1) {
      stay.until_done(report);
      return;
    }
    start_all_reduce(*comm, data);
    const Deadline deadline = after(milliseconds(100));
    expect_in_time(deadline, report, [&] {
      report.expect_error(ErrorKind::kBadState,
                          {"all_reduce of 4 float32 (16 bytes) on rank 0 of 2", "deadline"},
                          [&] { comm->wait(kStream, deadline); });
    });
    report.expect_error(ErrorKind::kBadState, {"a barrier on rank 0 of 2", "deadline"},
                        [&] { comm->barrier(kStream, after(milliseconds(100))); });
    stay.done(report);
  });
}

// Each line: what rank 1 does instead of an all_reduce of 4 float32.
struct Mismatch {
  const char* name;
  void (*call)(NcclComm& comm, void* data);
};
constexpr Mismatch kMismatches[] = {
    {"Count",
     [](NcclComm& comm, void* data) {
       comm.all_reduce(data, data, 5, DType::kFloat32, Reduction::kSum, kStream);
     }},
    {"DType",
     [](NcclComm& comm, void* data) {
       comm.all_reduce(data, data, 4, DType::kInt32, Reduction::kSum, kStream);
     }},
    {"Reduction",
     [](NcclComm& comm, void* data) {
       comm.all_reduce(data, data, 4, DType::kFloat32, Reduction::kMean, kStream);
     }},
    {"Order",
     [](NcclComm& comm, void* data) {
       comm.broadcast(data, 4, DType::kFloat32, 0, kStream);
       comm.all_reduce(data, data, 4, DType::kFloat32, Reduction::kSum, kStream);
     }},
    {"Kind",
     [](NcclComm& comm, void* data) {
       comm.all_to_all(data, static_cast<float*>(data) + 8, 4, DType::kFloat32, kStream);
     }},
};

class NcclMismatch : public testing::TestWithParam<Mismatch> {};

TEST_P(NcclMismatch, IsFoundOnEveryRank) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    std::vector<float> data(16, 1.0F);
    const auto comm = standin.join(id, rank, 2, soon());
    report.expect_error(ErrorKind::kBadState, {"NCCL error 5", "the same calls"}, [&] {
      if (rank == 0) {
        comm->all_reduce(data.data(), data.data(), 4, DType::kFloat32, Reduction::kSum, kStream);
      } else {
        GetParam().call(*comm, data.data());
      }
      comm->wait(kStream, soon());
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Of, NcclMismatch, testing::ValuesIn(kMismatches),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(NcclFaults, AnAsynchronousErrorIsSeenByCheckAndByTheNextCall) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    const auto comm = standin.join(id, rank, 2, soon());
    expect_sum(*comm, 1.0F, 2.0F, report);
    comm->check();
    standin.set_async_error(nccl::kUnhandledCudaError);
    report.expect_error(ErrorKind::kBadState, {"all_reduce of 1 float32", "NCCL error 1"},
                        [&] { comm->check(); });
    float value = 0;
    report.expect_error(ErrorKind::kBadState, {"broadcast of 1 float32", "NCCL error 1"},
                        [&] { comm->broadcast(&value, 1, DType::kFloat32, 0, kStream); });
    report.expect_error(ErrorKind::kBadState, {"NCCL error 1"}, [&] {
      CommGroup group(*comm);
      comm->broadcast(&value, 1, DType::kFloat32, 0, kStream);
    });
    report.expect(standin.num_misuses() == 0, "the group was ended");
  });
}

TEST(NcclFaults, AnAbortFromAnotherThreadEndsAWait) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  const Stay stay;
  run_ranks(2, [&](int rank, RankReport& report) {
    std::vector<float> data(4, 1.0F);
    const auto comm = standin.join(id, rank, 2, soon());
    if (rank == 1) {
      stay.until_done(report);
      return;
    }
    start_all_reduce(*comm, data);
    std::thread watch([&] {
      std::this_thread::sleep_for(milliseconds(50));
      comm->abort(soon());
    });
    report.expect_error(ErrorKind::kBadState, {"all_reduce of 4 float32", "was aborted"},
                        [&] { comm->wait(kStream, soon()); });
    watch.join();
    stay.done(report);
    report.expect(standin.stream_is_done(kStream) != 0, "the work was given up");
    comm->abort(soon());
    report.expect_error(ErrorKind::kBadState, {"was aborted"},
                        [&] { start_all_reduce(*comm, data); });
    report.expect_error(ErrorKind::kBadState, {"was aborted"},
                        [&] { (void)comm->shrink({1}, soon()); });
    report.expect(standin.num_misuses() == 0, "the stand-in found misuse");
  });
}

TEST(NcclFaults, AnAbortThatTakesTooLongIsLeftBehind) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    auto comm = standin.join(id, rank, 2, soon());
    standin.delay_aborts(30'000);
    const Deadline deadline = after(milliseconds(50));
    expect_in_time(deadline, report, [&] {
      report.expect_error(ErrorKind::kBadState, {"aborting rank", "deadline", "end this process"},
                          [&] { comm->abort(deadline); });
      comm.reset();
    });
  });
}

TEST(NcclFaults, OnlyAListOfOtherRanksIsLeftOut) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    const auto comm = standin.join(id, rank, 2, soon());
    for (const std::vector<int>& list :
         std::vector<std::vector<int>>{{}, {rank}, {2}, {-1}, {1 - rank, 1 - rank}}) {
      report.expect_error(ErrorKind::kBadValue, {"shrinking on rank", "each once, got"},
                          [&] { (void)comm->shrink(list, soon()); });
    }
    expect_sum(*comm, 1.0F, 2.0F, report);
    comm->close(soon());
  });
}

TEST(NcclFaults, ASurvivorThatIsMissingShowsAtTheDeadline) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(3, [&](int rank, RankReport& report) {
    const auto comm = standin.join(id, rank, 3, soon());
    if (rank != 0) return;
    const Deadline deadline = after(milliseconds(200));
    expect_in_time(deadline, report, [&] {
      report.expect_error(ErrorKind::kBadState,
                          {"shrinking the group to rank 0 of 2", "deadline", "a new group"},
                          [&] { (void)comm->shrink({1}, deadline); });
    });
    report.expect_error(ErrorKind::kBadState, {"was aborted"}, [&] { comm->check(); });
  });
}

TEST(NcclFaults, AnOldLibraryDoesNotShrink) {
  const NcclStandin standin(NCCL_STANDIN_OLD);
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    const auto comm = standin.join(id, rank, 2, soon());
    report.expect_error(ErrorKind::kBadState, {"shrinking a group", "2.27", "2.18.5"},
                        [&] { (void)comm->shrink({1 - rank}, soon()); });
  });
}

TEST(NcclFaults, AWaitNeedsSomebodyToAsk) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(1, [&](int rank, RankReport& report) {
    NcclComm comm(standin.library, id, rank, 1, {}, soon());
    report.expect_error(ErrorKind::kBadState,
                        {"rank 0 of 1 before its first call", "NcclOptions::is_stream_done"},
                        [&] { comm.wait(kStream, soon()); });
  });
}

}  // namespace
}  // namespace tradewind
