#include "checkpoint/shard_writer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <thread>
#include <tuple>

#include "base/error_matching.h"
#include "base/recording_env.h"
#include "base/temporary_directory.h"
#include "checkpoint/shard_case.h"

namespace tradewind {
namespace {

constexpr std::int64_t kBlock = 256 * 1024;

class ShardWriting : public TemporaryDirectory {
 protected:
  [[nodiscard]] std::string contents() const {
    return posix_env().read_file(at("shard"), std::int64_t{1} << 30);
  }
  // One save by a writer of its own.
  static ShardResult save(ShardWriter::Request request, int num_threads = 3) {
    ShardWriter writer(num_threads);
    const auto write = writer.start(std::move(request));
    EXPECT_TRUE(write->wait_until(in_a_minute()));
    return write->result();
  }
  void expect_saved(const ShardCase& input, const ShardResult& result) const {
    EXPECT_TRUE(contents() == input.file);
    EXPECT_EQ(result.size_bytes, static_cast<std::int64_t>(input.file.size()));
    EXPECT_EQ(result.block_crc32c, input.block_crc32c());
    EXPECT_EQ(result.crc32c, input.crc32c());
  }
  template <class Call>
  void expect_errno(int error, const Call& call) {
    try {
      call();
      ADD_FAILURE() << "expected errno " << error;
    } catch (const Error& found) {
      EXPECT_EQ(found.error_number(), error) << found.what();
      EXPECT_NE(std::string(found.what()).find(at("shard")), std::string::npos) << found.what();
    }
  }
};

// Misalignment of memory, block size, threads, and whether direct I/O is there.
class EveryShard : public ShardWriting,
                   public testing::WithParamInterface<std::tuple<int, std::int64_t, int, bool>> {};

TEST_P(EveryShard, HoldsTheHeaderTheMemoryAndZeros) {
  const auto [misalignment, block_bytes, num_threads, is_direct] = GetParam();
  auto env = std::make_shared<RecordingEnv>(posix_env(), /*keep_data=*/false);
  env->refuse_direct(!is_direct);
  ShardCase input({3 * kBlock + 5000, 100, 4096, 0, 70'000, kBlock, 200'000}, misalignment,
                  block_bytes, /*gap_pages=*/1);
  expect_saved(input, save(input.request(env, at("shard")), num_threads));
}

INSTANTIATE_TEST_SUITE_P(All, EveryShard,
                         testing::Combine(testing::Values(0, 512, 64, 1),
                                          testing::Values(std::int64_t{4096},
                                                          std::int64_t{17 * 4096}, kBlock,
                                                          std::int64_t{4} << 20),
                                          testing::Values(1, 5), testing::Bool()));

TEST_F(ShardWriting, TheSystemsOwnFilesToo) {
  ShardCase input({5 * kBlock + 123, 4097}, 0, kBlock);
  expect_saved(input, save(input.request(shared_posix_env(), at("shard"))));
}

TEST_F(ShardWriting, OneWriterSavesAgainAndAgain) {
  ShardWriter writer(4);
  for (const std::int64_t size :
       std::initializer_list<std::int64_t>{100, 3 * kBlock, 1, 7 * kBlock + 9}) {
    ShardCase input({size}, 0, kBlock);
    const auto write = writer.start(input.request(shared_posix_env(), at("shard")));
    ASSERT_TRUE(write->wait_until(in_a_minute()));
    expect_saved(input, write->result());
    posix_env().remove(at("shard"));
  }
}

TEST_F(ShardWriting, RecycledFilesHoldNothingOfBefore) {
  ShardCase input({2 * kBlock + 5000, 300}, 0, kBlock);
  for (const std::size_t old_bytes : {0, 100, 4096, 2 * 262144, 3'000'000}) {
    posix_env().write_file(at("shard"), std::string(old_bytes, 'x'), {});
    const auto before = posix_env().status(at("shard"));
    ShardWriter::Request request = input.request(shared_posix_env(), at("shard"));
    request.recycles = true;
    expect_saved(input, save(std::move(request)));
    EXPECT_EQ(posix_env().status(at("shard"))->inode, before->inode);
  }
}

TEST_F(ShardWriting, ANewFileIsNobodysAndARecycledOneNobodyElses) {
  ShardCase input({5000}, 0, kBlock);
  ShardWriter::Request fresh = input.request(shared_posix_env(), at("shard"));
  ShardWriter::Request recycled = fresh;
  recycled.recycles = true;
  expect_errno(ENOENT, [&] { (void)save(recycled); });
  posix_env().write_file(at("shard"), "old", {});
  expect_errno(EEXIST, [&] { (void)save(fresh); });
  {
    const auto reader = posix_env().open(at("shard"), {OpenMode::kRead});
    ASSERT_TRUE(reader->try_lock(LockKind::kShared));
    expect_errno(EWOULDBLOCK, [&] { (void)save(recycled); });
  }
  std::filesystem::create_hard_link(at("shard"), at("another name"));
  expect_errno(EMLINK, [&] { (void)save(recycled); });
  EXPECT_EQ(contents(), "old");
  std::filesystem::remove(at("another name"));
  expect_saved(input, save(recycled));
}

TEST_F(ShardWriting, TakesSpaceFirstAndSyncsOnceLast) {
  for (const bool recycles : {false, true}) {
    auto env = std::make_shared<RecordingEnv>(posix_env(), /*keep_data=*/false);
    ShardCase input({5 * kBlock}, 0, kBlock);
    ShardWriter::Request request = input.request(env, at("shard"));
    request.recycles = recycles;
    // The second time it is too long.
    if (recycles) std::filesystem::resize_file(at("shard"), input.file.size() + 8192);
    (void)save(std::move(request));
    std::vector<OperationKind> kinds;
    for (const Operation& operation : env->operations()) {
      const bool repeats = !kinds.empty() && kinds.back() == OperationKind::kWrite &&
                           operation.kind == OperationKind::kWrite;
      if (!repeats) kinds.push_back(operation.kind);
    }
    using enum OperationKind;
    EXPECT_EQ(kinds, recycles ? (std::vector<OperationKind>{kOpen, kLock, kWrite, kTruncate, kSync})
                              : (std::vector<OperationKind>{kCreate, kAllocate, kWrite, kSync}));
  }
}

// --- what goes wrong -----------------------------------------------------------------------------

// Every call of a save fails in turn, in every way; threads or not, fresh or recycled.
class EveryCall : public ShardWriting,
                  public testing::WithParamInterface<std::tuple<int, bool, bool>> {
 protected:
  // Saves with a fault at the index-th call; what it did until it was over.
  std::vector<Operation> operations_with(std::int64_t index, Fault fault, bool fails) {
    const auto [num_threads, recycles, is_aligned] = GetParam();
    std::filesystem::remove(at("shard"));
    if (recycles) posix_env().write_file(at("shard"), "old", {});
    auto env = std::make_shared<RecordingEnv>(posix_env(), /*keep_data=*/false);
    if (index >= 0) env->inject(index, fault);
    ShardCase& input = is_aligned ? aligned_ : unaligned_;
    ShardWriter::Request request = input.request(env, at("shard"));
    request.recycles = recycles;
    request.closing = memory_gate().close(input.ranges());
    if (fails) {
      expect_errno(fault.error, [&] { (void)save(request, num_threads); });
    } else {
      expect_saved(input, save(request, num_threads));
    }
    EXPECT_TRUE(memory_gate().is_open()) << "call " << index;
    return env->operations();
  }

 private:
  ShardCase aligned_{{3 * kBlock + 5000, 600}, 0, kBlock};
  ShardCase unaligned_{{3 * kBlock + 5000, 600}, 24, kBlock};
};

TEST_P(EveryCall, MayFailAndIsNeverTriedAgain) {
  const auto calls = static_cast<std::int64_t>(operations_with(-1, {}, false).size());
  ASSERT_GE(calls, 6);
  for (std::int64_t index = 0; index < calls; ++index) {
    for (const int error : {EIO, ENOSPC, EDQUOT}) {
      for (const bool is_sticky : {false, true}) {
        const auto done = operations_with(index, {.error = error, .is_sticky = is_sticky}, true);
        EXPECT_EQ(done[static_cast<std::size_t>(index)].error, error);
        const auto num_syncs = std::count_if(done.begin(), done.end(), [](const auto& one) {
          return one.kind == OperationKind::kSync;
        });
        EXPECT_EQ(num_syncs, index == calls - 1 ? 1 : 0) << "call " << index;
      }
    }
  }
}

TEST_P(EveryCall, MayBeInterruptedOrCutShort) {
  const std::vector<Operation> clean = operations_with(-1, {}, false);
  for (std::size_t index = 0; index < clean.size(); ++index) {
    const auto at_index = static_cast<std::int64_t>(index);
    (void)operations_with(at_index, {.error = EINTR}, false);
    for (const std::int64_t bytes : {1, 511, 4096, 5000}) {
      (void)operations_with(at_index, {.short_bytes = bytes}, false);
      (void)operations_with(at_index, {.error = EINTR, .short_bytes = bytes}, false);
    }
  }
}

TEST_P(EveryCall, AWriteThatRefusesDirectIsDoneThroughThePageCache) {
  const std::vector<Operation> clean = operations_with(-1, {}, false);
  for (std::size_t index = 0; index < clean.size(); ++index) {
    if (clean[index].kind != OperationKind::kWrite) continue;
    const auto done = operations_with(static_cast<std::int64_t>(index), {.error = EINVAL}, false);
    EXPECT_EQ(done[index].error, EINVAL);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCall,
                         testing::Combine(testing::Values(1, 4), testing::Bool(), testing::Bool()));

TEST_F(ShardWriting, AnErrorOfAPageCacheFileIsNotTriedAgain) {
  auto env = std::make_shared<RecordingEnv>(posix_env(), /*keep_data=*/false);
  env->refuse_direct(true);
  env->inject(2, {.error = EINVAL});
  ShardCase input({5000}, 0, kBlock);
  expect_errno(EINVAL, [&] { (void)save(input.request(env, at("shard"))); });
}

TEST_F(ShardWriting, RefusesWhatContradictsItself) {
  expect_error(ErrorKind::kBadValue, {"threads", "got 0"}, [] { const ShardWriter writer(0); });
  ShardCase input({5000}, 0, kBlock);
  ShardWriter writer(2);
  ShardWriter::Request request = input.request(shared_posix_env(), at("shard"));
  request.block_bytes = 1000;
  expect_error(ErrorKind::kBadValue, {"blocks", "1000"}, [&] { (void)writer.start(request); });
  request.block_bytes = kBlock;
  writer.close();
  writer.close();
  expect_error(ErrorKind::kBadState, {"closed"}, [&] { (void)writer.start(request); });
}

TEST_F(ShardWriting, AForkedChildHasNoThreadsAndSaysSo) {
  ShardCase input({3 * kBlock}, 0, kBlock);
  auto writer = std::make_unique<ShardWriter>(2);
  auto write = writer->start(input.request(shared_posix_env(), at("shard")));
  ASSERT_TRUE(write->wait_until(in_a_minute()));
  const auto is_refused = [](const auto& call) {
    try {
      call();
      return false;
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kBadState;
    }
  };
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    int code = 0;
    if (!is_refused([&] { (void)write->wait_until(in_a_minute()); })) code |= 1;
    if (!is_refused([&] { (void)write->result(); })) code |= 2;
    if (!is_refused(
            [&] { (void)writer->start(input.request(shared_posix_env(), at("another"))); })) {
      code |= 4;
    }
    write->cancel();
    writer->close();
    write.reset();
    writer.reset();
    _exit(code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  expect_saved(input, write->result());
}

}  // namespace
}  // namespace tradewind
