// The collectives of NcclComm over the stand-in: every one, every dtype, 2 to 4 processes.
#include "share/nccl_comm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "base/error_matching.h"
#include "share/forked_ranks.h"
#include "share/nccl_case.h"
#include "share/nccl_standin_control.h"
#include "step/format.h"

namespace tradewind {
namespace {

int stream_of_test = 0;
void* const kStream = &stream_of_test;

// A rank that has joined, and at the end closes and asks whether NCCL would have forgiven it.
class Member {
 public:
  Member(const NcclStandin& standin, const nccl::UniqueId& id, int rank, int size,
         RankReport& report)
      : comm(standin.join(id, rank, size, soon())), standin_(standin), report_(report) {}
  ~Member() {
    comm->close(soon());
    report_.expect(standin_.num_misuses() == 0, "the stand-in found misuse");
  }

  std::unique_ptr<NcclComm> comm;

 private:
  const NcclStandin& standin_;
  RankReport& report_;
};

bool can_reduce(DType dtype, Reduction reduction) {
  const bool is_number = is_floating(dtype) || is_complex(dtype);
  if (dtype == DType::kInt16) return false;
  if (reduction == Reduction::kMean) return is_number;
  return reduction == Reduction::kMax ? !is_complex(dtype) : dtype != DType::kBool;
}

// A third in 16 bits is off by half a unit, and so is each rounded result.
double tolerance_of(DType dtype, Reduction reduction, int size) {
  const bool is_exact = reduction != Reduction::kMean;
  if (is_exact) return 0;
  const double unit = dtype == DType::kBFloat16                                 ? 0x1p-8
                      : dtype == DType::kFloat16                                ? 0x1p-11
                      : dtype == DType::kFloat64 || dtype == DType::kComplex128 ? 0x1p-53
                                                                                : 0x1p-24;
  return size == 3 ? 2 * unit : unit;
}

void check_reductions(Comm& comm, const NcclCase& one, RankReport& report) {
  const std::string name(dtype_name(one.dtype));
  for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kMean}) {
    if (!can_reduce(one.dtype, reduction)) continue;
    const double tolerance = tolerance_of(one.dtype, reduction, one.size);
    const std::string what = name + ", reduction " + std::to_string(static_cast<int>(reduction));

    Bytes output = one.values(comm.rank());  // in place
    comm.all_reduce(output.data(), output.data(), one.num_elements, one.dtype, reduction, kStream);
    comm.wait(kStream, soon());
    Bytes expected = one.reduced(reduction);
    report.expect(one.distance(output, expected) <= tolerance, "all_reduce of " + what);

    const Bytes input = one.values(comm.rank(), one.size);
    comm.reduce_scatter(input.data(), output.data(), one.num_elements, one.dtype, reduction,
                        kStream);
    comm.wait(kStream, soon());
    expected = one.reduced(reduction, comm.rank() * one.num_values());
    report.expect(one.distance(output, expected) <= tolerance, "reduce_scatter of " + what);
  }
}

void check_moves(Comm& comm, const NcclCase& one, RankReport& report) {
  const std::string name(dtype_name(one.dtype));
  const Bytes own = one.values(comm.rank());
  Bytes gathered(one.bytes() * static_cast<std::size_t>(one.size));
  comm.all_gather(own.data(), gathered.data(), one.num_elements, one.dtype, kStream);
  comm.wait(kStream, soon());
  Bytes expected;
  for (int rank = 0; rank < one.size; ++rank) {
    const Bytes part = one.values(rank);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  report.expect(gathered == expected, "all_gather of " + name);

  const Bytes parts = one.values(comm.rank(), one.size);
  Bytes turned(parts.size());
  comm.all_to_all(parts.data(), turned.data(), one.num_elements, one.dtype, kStream);
  comm.wait(kStream, soon());
  expected.clear();
  for (int rank = 0; rank < one.size; ++rank) {
    const Bytes all = one.values(rank, one.size);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(one.bytes()) * comm.rank();
    expected.insert(expected.end(), first, first + static_cast<std::ptrdiff_t>(one.bytes()));
  }
  report.expect(turned == expected, "all_to_all of " + name);

  for (int root = 0; root < one.size; ++root) {
    Bytes data = one.values(comm.rank());
    comm.broadcast(data.data(), one.num_elements, one.dtype, root, kStream);
    comm.wait(kStream, soon());
    report.expect(data == one.values(root), "broadcast of " + name);
  }
}

class NcclCommOfSize : public testing::TestWithParam<int> {};

TEST_P(NcclCommOfSize, EveryCollectiveOfEveryDType) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(GetParam(), [&](int rank, RankReport& report) {
    Member member(standin, id, rank, GetParam(), report);
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      for (const std::int64_t num_elements : {1, 7, 2500}) {  // the last needs several chunks
        const NcclCase one{static_cast<DType>(dtype), num_elements, GetParam()};
        check_reductions(*member.comm, one, report);
        check_moves(*member.comm, one, report);
      }
    }
  });
}

TEST_P(NcclCommOfSize, InPlaceByParts) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(GetParam(), [&](int rank, RankReport& report) {
    Member member(standin, id, rank, GetParam(), report);
    const NcclCase one{DType::kFloat32, 3, GetParam()};
    const std::size_t own = one.bytes() * static_cast<std::size_t>(rank);
    Bytes data = one.values(rank, GetParam());
    member.comm->reduce_scatter(data.data(), data.data() + own, 3, one.dtype, Reduction::kSum,
                                kStream);
    member.comm->all_gather(data.data() + own, data.data(), 3, one.dtype, kStream);
    member.comm->wait(kStream, soon());
    const NcclCase whole{DType::kFloat32, 3 * GetParam(), GetParam()};
    report.expect(data == whole.reduced(Reduction::kSum), "reduce_scatter and all_gather");
  });
}

TEST_P(NcclCommOfSize, AGroupGoesOutTogether) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(GetParam(), [&](int rank, RankReport& report) {
    Member member(standin, id, rank, GetParam(), report);
    const NcclCase one{DType::kBFloat16, 5, GetParam()};
    Bytes sum = one.values(rank);
    Bytes largest = one.values(rank);
    const Bytes parts = one.values(rank, GetParam());
    Bytes turned(parts.size());
    CommGroup group(*member.comm);
    member.comm->all_reduce(sum.data(), sum.data(), 5, one.dtype, Reduction::kSum, kStream);
    member.comm->all_to_all(parts.data(), turned.data(), 5, one.dtype, kStream);
    member.comm->all_reduce(largest.data(), largest.data(), 5, one.dtype, Reduction::kMax, kStream);
    report.expect(standin.stream_is_done(kStream) != 0, "nothing goes out before the end");
    report.expect_error(ErrorKind::kBadState, {"a barrier on rank", "no open group"},
                        [&] { member.comm->barrier(kStream, soon()); });
    report.expect_error(ErrorKind::kBadState, {"all_reduce of 5 bfloat16", "no open group"},
                        [&] { member.comm->wait(kStream, soon()); });
    group.end();
    member.comm->wait(kStream, soon());
    report.expect(sum == one.reduced(Reduction::kSum), "sum in a group");
    report.expect(largest == one.reduced(Reduction::kMax), "max in a group");
    report.expect(turned != parts, "all_to_all in a group");
    report.expect_error(ErrorKind::kBadState, {"ending a group", "found none"},
                        [&] { member.comm->group_end(); });
  });
}

TEST_P(NcclCommOfSize, ABarrierWaitsForAll) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* num_here = new (shared) std::atomic<int>(0);
  run_ranks(GetParam(), [&](int rank, RankReport& report) {
    Member member(standin, id, rank, GetParam(), report);
    for (int round = 1; round <= 3; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank * 10));
      ++*num_here;
      member.comm->barrier(kStream, soon());
      report.expect(*num_here >= round * GetParam(), "a rank was not there yet");
      member.comm->barrier(kStream, soon());
    }
  });
  munmap(shared, 4096);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclCommOfSize, testing::Values(2, 3, 4));

TEST(NcclComm, RegisteredMemory) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    Member member(standin, id, rank, 2, report);
    const NcclMemory memory(standin.library, 64);
    auto* data = static_cast<float*>(memory.data());
    for (int i = 0; i < 16; ++i) data[i] = static_cast<float>(i + rank);
    const MemoryToken token = member.comm->register_memory(data, 64);
    report.expect(token.handle != nullptr, "a token");
    member.comm->all_reduce(data, data, 16, DType::kFloat32, Reduction::kMean, kStream);
    member.comm->wait(kStream, soon());
    for (int i = 0; i < 16; ++i) {
      report.expect(data[i] == static_cast<float>(i) + 0.5F, "the mean of halves is exact");
    }
    member.comm->deregister_memory(token);
  });
}

TEST(NcclComm, WhatNcclDoesNotAddIsNamed) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    Member member(standin, id, rank, 2, report);
    std::int16_t values[4] = {};
    report.expect_error(ErrorKind::kBadType, {"all_reduce of 4 int16 (8 bytes)", "int32"}, [&] {
      member.comm->all_reduce(values, values, 4, DType::kInt16, Reduction::kSum, kStream);
    });
  });
}

TEST(NcclComm, AnOldLibraryTakesItsOwnMeanAndNamesTheRest) {
  const NcclStandin standin(NCCL_STANDIN_OLD);
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    Member member(standin, id, rank, 2, report);
    const NcclCase one{DType::kFloat32, 9, 2};
    Bytes data = one.values(rank);
    member.comm->all_reduce(data.data(), data.data(), 9, one.dtype, Reduction::kMean, kStream);
    member.comm->wait(kStream, soon());
    report.expect(data == one.reduced(Reduction::kMean), "the mean");
    report.expect_error(ErrorKind::kBadState, {"registered memory", "2.19", "2.18.5"},
                        [&] { (void)member.comm->register_memory(data.data(), 36); });
    report.expect_error(ErrorKind::kBadState, {"memory made by NCCL", "2.19", "2.18.5"},
                        [&] { member.comm->barrier(kStream, soon()); });
  });
}

TEST(NcclComm, NothingIsLeftAfterAClose) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    const auto comm = standin.join(id, rank, 2, soon());
    comm->close(soon());
    float value = 0;
    report.expect_error(ErrorKind::kBadState, {"broadcast of 1 float32", "was closed"},
                        [&] { comm->broadcast(&value, 1, DType::kFloat32, 0, kStream); });
    report.expect_error(ErrorKind::kBadState, {"was closed"}, [&] { comm->check(); });
    comm->abort(soon());
    report.expect(standin.num_misuses() == 0, "the stand-in found misuse");
  });
}

TEST(NcclComm, AForkedChildHasNoPartInIt) {
  const NcclStandin standin;
  const nccl::UniqueId id = NcclComm::make_id(*standin.library);
  run_ranks(2, [&](int rank, RankReport& report) {
    Member member(standin, id, rank, 2, report);
    run_ranks(1, [&](int, RankReport& child) {
      child.expect_error(ErrorKind::kBadState, {"made in process", "a fork has no part"},
                         [&] { member.comm->check(); });
      member.comm->close(soon());
      member.comm.reset();
    });
    float value = static_cast<float>(rank + 1);
    member.comm->all_reduce(&value, &value, 1, DType::kFloat32, Reduction::kSum, kStream);
    member.comm->wait(kStream, soon());
    report.expect(value == 3.0F, "the group goes on");
  });
}

TEST(NcclTypes, OneNthIsRoundedToNearestEven) {
  for (int n = 1; n <= kMostFloat16Ranks; ++n) {
    const float exact = 1.0F / static_cast<float>(n);
    ASSERT_EQ(nccl_reciprocal(n, nccl::kFloat32).float32, exact) << n;
    ASSERT_EQ(nccl_reciprocal(n, nccl::kFloat64).float64, 1.0 / n) << n;
    ASSERT_EQ(nccl_reciprocal(n, nccl::kBfloat16).bits16, to_bfloat16(exact)) << n;
    ASSERT_EQ(nccl_reciprocal(n, nccl::kFloat16).bits16, nccl_standin::to_float16(exact)) << n;
  }
}

}  // namespace
}  // namespace tradewind
