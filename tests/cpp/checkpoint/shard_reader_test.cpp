#include "checkpoint/shard_reader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>

#include "base/error_matching.h"
#include "base/temporary_directory.h"
#include "checkpoint/hooked_env.h"
#include "checkpoint/shard_case.h"

namespace tradewind {
namespace {

constexpr std::int64_t kBlock = 256 * 1024;

// A file of several blocks, written without the writer.
class ShardReading : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    write(input.file);
  }
  void write(const std::string& bytes) { posix_env().write_file(at("shard"), bytes, {}); }

  [[nodiscard]] ShardRequest request(std::vector<ShardTarget> targets) const {
    return {at("shard"),
            static_cast<std::int64_t>(input.file.size()),
            input.block_bytes,
            sums,
            std::move(targets),
            3,
            false};
  }
  [[nodiscard]] std::string part(const ShardTarget& target) const {
    return input.file.substr(static_cast<std::size_t>(target.file_offset),
                             static_cast<std::size_t>(target.size_bytes));
  }
  // What was read into each target is what stands in the file.
  void expect_filled(const std::vector<ShardTarget>& targets) const {
    for (const ShardTarget& target : targets) {
      EXPECT_EQ(std::string(static_cast<const char*>(target.data),
                            static_cast<std::size_t>(target.size_bytes)) == part(target),
                true)
          << target.size_bytes << " bytes from " << target.file_offset;
    }
  }
  void expect_errno(int error, Env& env, const ShardRequest& wanted) {
    try {
      read_shard(env, wanted);
      ADD_FAILURE() << "expected errno " << error;
    } catch (const Error& found) {
      EXPECT_EQ(found.error_number(), error) << found.what();
      EXPECT_NE(std::string(found.what()).find(at("shard")), std::string::npos);
    }
  }

  ShardCase input{{3 * kBlock + 5000, 100, 2 * kBlock}, 0, kBlock};
  std::vector<std::uint32_t> sums = input.block_crc32c();
};

TEST_F(ShardReading, FillsTargetsOfEveryAlignment) {
  const auto size = static_cast<std::int64_t>(input.file.size());
  for (const std::int64_t misalignment : {0, 512, 8, 1}) {
    for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4096},
                                     std::int64_t{kBlock - 7}, std::int64_t{2 * kBlock}}) {
      for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{kBlock},
                                       std::int64_t{3 * kBlock + 17}, size - begin}) {
        Bytes memory(bytes + 2, misalignment, 99);
        const std::string before = memory.text();
        const std::vector<ShardTarget> targets{{begin, bytes, memory.data() + 1}};
        read_shard(posix_env(), request(targets));
        expect_filled(targets);
        EXPECT_EQ(memory.data()[0], before.front());
        EXPECT_EQ(memory.data()[bytes + 1], before.back());
        // The same where pages can be read in place.
        const std::vector<ShardTarget> aligned{{begin, bytes, memory.data()}};
        read_shard(posix_env(), request(aligned));
        expect_filled(aligned);
      }
    }
  }
}

TEST_F(ShardReading, OnePartMayBeWantedInSeveralPlacesInAnyOrder) {
  std::vector<Bytes> memory;
  std::vector<ShardTarget> targets;
  for (const auto& [begin, bytes] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {4 * kBlock, kBlock},
           {8192, 3 * kBlock},
           {8192, 3 * kBlock},
           {kBlock, kBlock},
           {kBlock + 4096, 10'000},
           {0, static_cast<std::int64_t>(input.file.size())},
           {5000, 1},
           {8192, 2 * kBlock}}) {
    memory.emplace_back(bytes, memory.size() % 3 == 2 ? 5 : 0, 50 + memory.size());
    targets.push_back({begin, bytes, memory.back().data()});
  }
  read_shard(posix_env(), request(targets));
  expect_filled(targets);
}

TEST_F(ShardReading, ReadsTheBlocksThatTargetsTouchAndNoOthers) {
  std::mutex mutex;
  std::set<std::int64_t> blocks;
  HookedEnv env([&](const Access& access) -> std::optional<std::int64_t> {
    const std::scoped_lock lock(mutex);
    for (std::int64_t at = access.offset; at < access.offset + access.size_bytes; at += 4096) {
      blocks.insert(at / kBlock);
    }
    return std::nullopt;
  });
  Bytes memory(2 * kBlock, 0, 1);
  ShardRequest wanted =
      request({{kBlock - 1, 1, memory.data()}, {4 * kBlock - 1, 2, memory.data() + 10}});
  read_shard(env, wanted);
  EXPECT_EQ(blocks, (std::set<std::int64_t>{0, 3, 4}));
  blocks.clear();
  wanted.verifies_all = true;
  read_shard(env, wanted);
  EXPECT_EQ(blocks, (std::set<std::int64_t>{0, 1, 2, 3, 4, 5}));
  blocks.clear();
  read_shard(env, request({}));
  EXPECT_TRUE(blocks.empty());
  ShardRequest all = request({});
  all.verifies_all = true;
  read_shard(env, all);
  EXPECT_EQ(blocks.size(), 6U);
}

TEST_F(ShardReading, NamesTheBlockOfEveryFlippedBit) {
  const auto size = static_cast<std::int64_t>(input.file.size());
  Bytes memory(size, 0, 1);
  for (const std::int64_t place :
       {std::int64_t{0}, std::int64_t{8191}, std::int64_t{kBlock - 1}, std::int64_t{kBlock},
        std::int64_t{3 * kBlock + 20'000}, size - 1}) {
    std::string damaged = input.file;
    damaged[static_cast<std::size_t>(place)] ^= 0x10;
    write(damaged);
    const std::int64_t block = place / kBlock;
    const std::initializer_list<std::string> named{at("shard"), "block " + std::to_string(block),
                                                   std::to_string(block * kBlock), "CRC-32C"};
    // Read in place, copied, and not wanted at all.
    expect_error(ErrorKind::kDamaged, named,
                 [&] { read_shard(posix_env(), request({{0, size, memory.data()}})); });
    expect_error(ErrorKind::kDamaged, named,
                 [&] { read_shard(posix_env(), request({{place, 1, memory.data()}})); });
    ShardRequest elsewhere = request({{(block + 2) % 6 * kBlock, 1, memory.data()}});
    read_shard(posix_env(), elsewhere);
    elsewhere.verifies_all = true;
    expect_error(ErrorKind::kDamaged, named, [&] { read_shard(posix_env(), elsewhere); });
  }
}

TEST_F(ShardReading, NamesAnotherSize) {
  Bytes memory(100, 0, 1);
  const std::string size = std::to_string(input.file.size());
  for (const std::string& other :
       {std::string(), input.file.substr(0, input.file.size() - 1), input.file + "x"}) {
    write(other);
    expect_error(ErrorKind::kDamaged, {at("shard"), size, std::to_string(other.size())},
                 [&] { read_shard(posix_env(), request({{0, 100, memory.data()}})); });
  }
}

TEST_F(ShardReading, AFileThatEndsMeanwhileIsDamaged) {
  HookedEnv env([](const Access& access) -> std::optional<std::int64_t> {
    if (access.offset >= 2 * kBlock) return 0;
    return std::nullopt;
  });
  Bytes memory(kBlock, 0, 1);
  expect_error(ErrorKind::kDamaged, {at("shard"), "block 2", std::to_string(2 * kBlock)},
               [&] { read_shard(env, request({{2 * kBlock, 100, memory.data()}})); });
}

TEST_F(ShardReading, InterruptsAndShortReadsAreContinued) {
  std::atomic<int> num_calls = 0;
  HookedEnv env([&](const Access& access) -> std::optional<std::int64_t> {
    switch (num_calls++ % 3) {
      case 0: return -EINTR;
      case 1: return std::min<std::int64_t>(access.size_bytes, 8192);
      default: return std::nullopt;
    }
  });
  const auto size = static_cast<std::int64_t>(input.file.size());
  Bytes memory(size, 0, 1);
  const std::vector<ShardTarget> targets{{0, size, memory.data()}};
  read_shard(env, request(targets));
  expect_filled(targets);
}

TEST_F(ShardReading, WhereDirectReadsAreRefusedThePageCacheServes) {
  std::atomic<int> num_refused = 0, num_buffered = 0;
  HookedEnv env([&](const Access& access) -> std::optional<std::int64_t> {
    if (!access.is_direct) {
      ++num_buffered;
      return std::nullopt;
    }
    ++num_refused;
    return -EINVAL;
  });
  const auto size = static_cast<std::int64_t>(input.file.size());
  Bytes memory(size, 0, 1);
  const std::vector<ShardTarget> targets{{0, size, memory.data()}};
  read_shard(env, request(targets));
  expect_filled(targets);
  EXPECT_GT(num_buffered, 0);
}

TEST_F(ShardReading, OtherErrorsOfTheSystemSurface) {
  Bytes memory(kBlock, 0, 1);
  const ShardRequest wanted = request({{kBlock, kBlock, memory.data()}});
  HookedEnv env([](const Access&) -> std::optional<std::int64_t> { return -EIO; });
  expect_errno(EIO, env, wanted);
  posix_env().remove(at("shard"));
  expect_errno(ENOENT, posix_env(), wanted);
}

TEST_F(ShardReading, HoldsASharedLockMeanwhile) {
  Bytes memory(kBlock, 0, 1);
  const ShardRequest wanted = request({{0, kBlock, memory.data()}});
  std::atomic<int> num_tried = 0;
  HookedEnv env([&](const Access&) -> std::optional<std::int64_t> {
    const auto other = posix_env().open(at("shard"), {OpenMode::kWriteExisting});
    EXPECT_FALSE(other->try_lock(LockKind::kExclusive));
    EXPECT_TRUE(other->try_lock(LockKind::kShared));
    ++num_tried;
    return std::nullopt;
  });
  read_shard(env, wanted);
  EXPECT_GT(num_tried, 0);
  const auto other = posix_env().open(at("shard"), {OpenMode::kWriteExisting});
  EXPECT_TRUE(other->try_lock(LockKind::kExclusive));
  expect_errno(EWOULDBLOCK, posix_env(), wanted);
}

TEST_F(ShardReading, RefusesWhatContradictsItself) {
  Bytes memory(kBlock, 0, 1);
  const auto size = static_cast<std::int64_t>(input.file.size());
  const auto refuses = [&](std::initializer_list<std::string> parts, const auto& change) {
    ShardRequest wanted = request({{0, 10, memory.data()}});
    change(wanted);
    expect_error(ErrorKind::kBadValue, parts, [&] { read_shard(posix_env(), wanted); });
  };
  for (const std::int64_t bytes : {0, -4096, 1000}) {
    refuses({at("shard"), "blocks"}, [&](auto& wanted) { wanted.block_bytes = bytes; });
  }
  refuses({"threads"}, [](auto& wanted) { wanted.num_threads = 0; });
  refuses({"checksums", "got 5"}, [](auto& wanted) { wanted.block_crc32c.pop_back(); });
  refuses({"checksums", "expected 0"}, [](auto& wanted) { wanted.size_bytes = 0; });
  for (const auto& [begin, bytes] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {-1, 10}, {0, -1}, {0, size + 1}, {size, 1}, {INT64_MAX, 10}, {10, INT64_MAX}}) {
    refuses({"targets", std::to_string(begin), std::to_string(bytes)},
            [&](auto& wanted) { wanted.targets.push_back({begin, bytes, memory.data()}); });
  }
  refuses({"targets"}, [](auto& wanted) { wanted.targets.push_back({0, 1, nullptr}); });
}

// Of other makers: no whole pages.
TEST_F(ShardReading, AFileOfAnySizeCanBeRead) {
  input.file.resize(input.file.size() - 1234);
  const std::size_t last = input.file.size() / kBlock * kBlock;
  sums.back() = reference_crc32c(input.file.data() + last, input.file.size() - last);
  write(input.file);
  const auto size = static_cast<std::int64_t>(input.file.size());
  Bytes memory(size, 0, 1);
  const std::vector<ShardTarget> targets{{0, size, memory.data()}};
  read_shard(posix_env(), request(targets));
  expect_filled(targets);
}

}  // namespace
}  // namespace tradewind
