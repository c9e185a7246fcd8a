// What the base class checks, and how it describes a call.
#include "share/comm.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <optional>

#include "base/error_matching.h"

namespace tradewind {
namespace {

// Keeps the last call that came through, and refuses to end a group when told.
class RecordingComm final : public Comm {
 public:
  RecordingComm(int rank, int size) : Comm(rank, size) {}
  void barrier(void*, Deadline) override {}
  void wait(void*, Deadline) override {}
  void group_begin() override { ++depth; }
  void group_end() override {
    --depth;
    if (refuses_end) fail(ErrorKind::kBadState, "refused");
  }
  MemoryToken register_memory(void* data, std::int64_t) override { return {data}; }
  void deregister_memory(MemoryToken) override {}
  void check() override {}
  void abort(Deadline) override {}

  std::optional<CommCall> last;
  int depth = 0;
  bool refuses_end = false;

 private:
  void queue(const CommCall& call) override { last = call; }
};

TEST(Comm, ARankOutsideTheGroupIsRefused) {
  expect_error(ErrorKind::kBadValue, {"a group of 4 ranks", "0 to 3", "got 4"},
               [] { RecordingComm(4, 4); });
  expect_error(ErrorKind::kBadValue, {"got -1"}, [] { RecordingComm(-1, 4); });
  expect_error(ErrorKind::kBadValue, {"a group of 0 ranks"}, [] { RecordingComm(0, 0); });
}

TEST(Comm, ACallReachesTheBackEndAsItWasMade) {
  RecordingComm comm(1, 4);
  std::array<float, 8> input{};
  std::array<float, 2> output{};
  int stream = 0;
  comm.reduce_scatter(input.data(), output.data(), 2, DType::kFloat32, Reduction::kMean, &stream);
  ASSERT_TRUE(comm.last);
  EXPECT_EQ(comm.last->collective, Collective::kReduceScatter);
  EXPECT_EQ(comm.last->input, input.data());
  EXPECT_EQ(comm.last->output, output.data());
  EXPECT_EQ(comm.last->num_elements, 2);
  EXPECT_EQ(comm.last->reduction, Reduction::kMean);
  EXPECT_EQ(comm.last->stream, &stream);
  EXPECT_EQ(bytes_of(*comm.last, 4), 32);
  EXPECT_EQ(text_of(*comm.last, 1, 4), "reduce_scatter of 4 x 2 float32 (32 bytes) on rank 1 of 4");
  comm.broadcast(output.data(), 2, DType::kFloat32, 3, nullptr);
  EXPECT_EQ(comm.last->root, 3);
  EXPECT_EQ(text_of(*comm.last, 1, 4), "broadcast of 2 float32 (8 bytes) on rank 1 of 4");
}

TEST(Comm, NothingIsSentWhereThereAreNoElements) {
  RecordingComm comm(0, 2);
  comm.all_reduce(nullptr, nullptr, 0, DType::kFloat32, Reduction::kSum, nullptr);
  comm.all_to_all(nullptr, nullptr, 0, DType::kFloat32, nullptr);
  EXPECT_FALSE(comm.last);
}

TEST(Comm, WrongValuesAreNamed) {
  RecordingComm comm(1, 2);
  std::array<float, 8> data{};
  float* a = data.data();
  const auto refused = [&](std::initializer_list<std::string> parts, const auto& call) {
    expect_error(ErrorKind::kBadValue, parts, call);
    EXPECT_FALSE(comm.last);
  };
  refused({"all_reduce on rank 1 of 2", "got -1"},
          [&] { comm.all_reduce(a, a, -1, DType::kFloat32, Reduction::kSum, nullptr); });
  refused({"all_gather", "float64"}, [&] {
    comm.all_gather(a, a, std::numeric_limits<std::int64_t>::max() / 8, DType::kFloat64, nullptr);
  });
  refused({"all_reduce of 2 float32 (8 bytes)", "null as its input"},
          [&] { comm.all_reduce(nullptr, a, 2, DType::kFloat32, Reduction::kSum, nullptr); });
  refused({"all_gather of 2 x 2 float32 (16 bytes)", "null as its output"},
          [&] { comm.all_gather(a, nullptr, 2, DType::kFloat32, nullptr); });
  refused({"all_to_all of 2 x 2 float32", "an output of its own"},
          [&] { comm.all_to_all(a, a + 3, 2, DType::kFloat32, nullptr); });
  refused({"all_to_all of 2 x 2 float32", "an output of its own"},
          [&] { comm.all_to_all(a + 3, a, 2, DType::kFloat32, nullptr); });
  refused({"broadcast of 1 float32", "0 to 1", "got 2"},
          [&] { comm.broadcast(a, 1, DType::kFloat32, 2, nullptr); });
}

TEST(Comm, WhatHasNoSuchReductionIsNamed) {
  RecordingComm comm(0, 2);
  std::array<double, 4> data{};
  const auto refused = [&](DType dtype, Reduction reduction, const std::string& part) {
    expect_error(ErrorKind::kBadType, {part, "all_reduce of 2 " + std::string(dtype_name(dtype))},
                 [&] { comm.all_reduce(&data, &data, 2, dtype, reduction, nullptr); });
    EXPECT_FALSE(comm.last);
  };
  refused(DType::kInt64, Reduction::kMean, "mean of integers");
  refused(DType::kBool, Reduction::kMean, "mean of integers");
  refused(DType::kComplex64, Reduction::kMax, "no order");
  refused(DType::kBool, Reduction::kSum, "use max");
}

TEST(CommGroup, EndsOnceAndOnTheWayOutOfAFailure) {
  RecordingComm comm(0, 2);
  {
    CommGroup group(comm);
    EXPECT_EQ(comm.depth, 1);
    group.end();
    EXPECT_EQ(comm.depth, 0);
  }
  EXPECT_EQ(comm.depth, 0);
  comm.refuses_end = true;
  expect_error(ErrorKind::kBadValue, {"rank"}, [&] {
    const CommGroup group(comm);
    float value = 0;
    comm.broadcast(&value, 1, DType::kFloat32, 7, nullptr);
  });
  EXPECT_EQ(comm.depth, 0);
}

}  // namespace
}  // namespace tradewind
