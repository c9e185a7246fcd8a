#include "base/recording_env.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error_matching.h"
#include "base/temporary_directory.h"

namespace tradewind {
namespace {

class Recording : public TemporaryDirectory {
 protected:
  RecordingEnv env{posix_env()};

  [[nodiscard]] std::vector<std::string> kinds() const {
    std::vector<std::string> names;
    for (const Operation& operation : env.operations()) names.emplace_back(name_of(operation.kind));
    return names;
  }
  [[nodiscard]] std::string contents(const std::string& name) const {
    return posix_env().read_file(at(name), 1 << 20);
  }
  template <class Call>
  void expect_errno(int error, const Call& call) {
    try {
      call();
      ADD_FAILURE() << "expected errno " << error;
    } catch (const Error& found) {
      EXPECT_EQ(found.error_number(), error) << found.what();
    }
  }
};

using Kinds = std::vector<std::string>;

TEST_F(Recording, EveryChangeIsWrittenDownInOrder) {
  env.make_directory(at("d"));
  {
    const auto file = env.open(at("d/a"), {OpenMode::kCreateExclusive});
    file->allocate(0, 4096);
    write_fully(*file, "hello", 5, 10);
    file->truncate(15);
    file->sync();
    EXPECT_TRUE(file->try_lock(LockKind::kExclusive));
  }
  env.sync_directory(at("d"));
  (void)env.open(at("d/a"), {OpenMode::kWriteExisting});
  (void)env.open(at("d/a"), {OpenMode::kCreateOrTruncate});
  env.rename(at("d/a"), at("d/b"));
  env.remove(at("d/b"));
  env.remove_directory(at("d"));
  ASSERT_EQ(kinds(),
            (Kinds{"make_directory", "create", "allocate", "write", "truncate", "sync", "lock",
                   "sync_directory", "open", "truncate", "rename", "remove", "remove_directory"}));
  const std::vector<Operation> done = env.operations();
  EXPECT_EQ(done[2].size_bytes, 4096);
  EXPECT_EQ(done[3].path, at("d/a"));
  EXPECT_EQ(done[3].offset, 10);
  EXPECT_EQ(done[3].size_bytes, 5);
  EXPECT_EQ(done[3].data, "hello");
  EXPECT_EQ(done[4].offset, 15);
  EXPECT_EQ(done[9].offset, 0);
  EXPECT_EQ(done[10].to, at("d/b"));
  for (const Operation& operation : done) EXPECT_EQ(operation.error, 0);
  const std::int64_t directory = done[0].file;
  const std::int64_t file = done[1].file;
  EXPECT_GE(directory, 0);
  EXPECT_NE(directory, file);
  for (const std::size_t i : {2, 3, 4, 5, 6, 8, 9, 10, 11}) EXPECT_EQ(done[i].file, file) << i;
  for (const std::size_t i : {7, 12}) EXPECT_EQ(done[i].file, directory) << i;
}

TEST_F(Recording, WhatOnlyReadsIsNot) {
  posix_env().write_file(at("a"), "text", {});
  EXPECT_EQ(env.read_file(at("a"), 10), "text");
  EXPECT_EQ(env.list_directory(directory()), Kinds{"a"});
  EXPECT_TRUE(env.status(at("a")).has_value());
  EXPECT_FALSE(env.status(at("b")).has_value());
  env.make_directories(directory());
  EXPECT_EQ(kinds(), Kinds{});
}

TEST_F(Recording, FailuresOfTheSystemAreWrittenDownToo) {
  expect_errno(ENOENT, [&] { (void)env.open(at("a"), {OpenMode::kWriteExisting}); });
  expect_errno(ENOENT, [&] { env.rename(at("a"), at("b")); });
  env.write_file(at("a"), "x", {});
  expect_errno(EEXIST, [&] { (void)env.open(at("a"), {OpenMode::kCreateExclusive}); });
  const std::vector<Operation> done = env.operations();
  EXPECT_EQ(done[0].error, ENOENT);
  EXPECT_EQ(done[0].file, -1);
  EXPECT_EQ(done[1].error, ENOENT);
  EXPECT_EQ(done.back().error, EEXIST);
}

TEST_F(Recording, IdsSurviveRenamesAndAreNeverUsedAgain) {
  std::set<std::int64_t> seen;
  for (int i = 0; i < 50; ++i) {  // the file system gives the same inode again and again
    env.clear();
    env.write_file(at("a"), "x", {.sync = false});
    env.rename(at("a"), at("b"));
    (void)env.open(at("b"), {OpenMode::kWriteExisting});
    if (i % 2 == 0) {
      env.remove(at("b"));
    } else {
      env.write_file(at("c"), "y", {.sync = false});
      env.rename(at("c"), at("b"));  // replaces, and is itself replaced in the next round
    }
    const std::vector<Operation> done = env.operations();
    for (std::size_t k = 0; k < 4; ++k) EXPECT_EQ(done[k].file, done[0].file);
    EXPECT_TRUE(seen.insert(done[0].file).second) << "used again";
    if (i % 2 == 1) {
      EXPECT_TRUE(seen.insert(done[4].file).second);
      EXPECT_EQ(done[6].file, done[4].file);
    }
  }
}

// Half of what happens to a file is not seen here, and its inode comes back all the same.
TEST_F(Recording, IdsAreNotUsedAgainWhereOthersMakeOrRemoveTheFile) {
  std::set<std::int64_t> seen;
  const auto open_and_see = [&] {
    env.clear();
    (void)env.open(at("a"), {OpenMode::kWriteExisting});
    EXPECT_TRUE(seen.insert(env.operations()[0].file).second) << "used again";
  };
  for (int i = 0; i < 50; ++i) {
    posix_env().write_file(at("a"), "x", {.sync = false});
    open_and_see();
    env.remove(at("a"));
  }
  for (int i = 0; i < 50; ++i) {
    env.write_file(at("a"), "x", {.sync = false});
    open_and_see();
    posix_env().remove(at("a"));
  }
  env.write_file(at("b"), "x", {.sync = false});
  for (int i = 0; i < 50; ++i) {
    posix_env().write_file(at("a"), "x", {.sync = false});
    open_and_see();
    env.rename(at("a"), at("b"));
  }
  for (int i = 0; i < 50; ++i) {
    posix_env().make_directory(at("d"));
    env.clear();
    env.sync_directory(at("d"));
    env.remove_directory(at("d"));
    EXPECT_TRUE(seen.insert(env.operations()[0].file).second) << "used again";
  }
}

TEST_F(Recording, AFileOfTwoNamesKeepsItsIdUntilBothAreGone) {
  env.write_file(at("a"), "x", {});
  std::filesystem::create_hard_link(at("a"), at("b"));
  env.remove(at("a"));
  (void)env.open(at("b"), {OpenMode::kWriteExisting});
  const std::vector<Operation> done = env.operations();
  EXPECT_EQ(done.back().file, done.front().file);
}

TEST_F(Recording, FilesThatWereThereHaveIdsToo) {
  posix_env().write_file(at("a"), "x", {});
  posix_env().write_file(at("b"), "x", {});
  env.remove(at("a"));
  env.rename(at("b"), at("c"));
  env.remove(at("c"));
  const std::vector<Operation> done = env.operations();
  EXPECT_NE(done[0].file, done[1].file);
  EXPECT_EQ(done[1].file, done[2].file);
}

// Each call of a sequence in turn, each error: the call reports it and has done nothing.
TEST_F(Recording, AnyCallCanBeMadeToFail) {
  const auto sequence = [&](RecordingEnv& under_test) {
    under_test.make_directory(at("d"));
    under_test.write_file(at("d/a"), "text", {});
    under_test.rename(at("d/a"), at("d/b"));
    under_test.sync_directory(at("d"));
    under_test.remove(at("d/b"));
    under_test.remove_directory(at("d"));
  };
  sequence(env);
  const std::size_t num_calls = env.operations().size();
  ASSERT_EQ(num_calls, 8U);
  for (const int error : {EIO, ENOSPC, EDQUOT, EACCES}) {
    for (std::size_t index = 0; index < num_calls; ++index) {
      RecordingEnv broken(posix_env());
      broken.inject(static_cast<std::int64_t>(index), {.error = error});
      expect_errno(error, [&] { sequence(broken); });
      const std::vector<Operation> done = broken.operations();
      ASSERT_EQ(done.size(), index + 1);
      EXPECT_EQ(done.back().error, error);
      EXPECT_EQ(done.back().data, "");
      const bool has_text = index > 2 && index < 7;
      const std::string name = index > 4 ? "d/b" : "d/a";
      if (has_text) {
        EXPECT_EQ(contents(name), "text") << index;
      }
      if (index == 0) {
        EXPECT_FALSE(std::filesystem::exists(at("d")));
      }
      if (index == 1) {
        EXPECT_TRUE(std::filesystem::is_empty(at("d")));
      }
      if (index == 2) {
        EXPECT_EQ(contents("d/a"), "");
      }
      std::filesystem::remove_all(at("d"));
    }
  }
}

TEST_F(Recording, AnInterruptedCallIsMadeAgain) {
  env.write_file(at("a"), "text", {});
  env.rename(at("a"), at("b"));
  const std::size_t num_calls = env.operations().size();
  for (std::size_t index = 0; index < num_calls; ++index) {
    RecordingEnv interrupted(posix_env());
    interrupted.inject(static_cast<std::int64_t>(index), {.error = EINTR, .is_sticky = true});
    interrupted.write_file(at("a"), "text", {});
    interrupted.rename(at("a"), at("b"));
    EXPECT_EQ(contents("b"), "text");
    const std::vector<Operation> done = interrupted.operations();
    ASSERT_EQ(done.size(), num_calls + 1);
    EXPECT_EQ(done[index].error, EINTR);
    EXPECT_EQ(done[index].kind, done[index + 1].kind);
  }
}

TEST_F(Recording, ACallThatIsAlwaysInterruptedEnds) {
  for (std::int64_t index = 0; index < 5000; ++index) env.inject(index, {.error = EINTR});
  expect_errno(EINTR, [&] { env.make_directory(at("d")); });
  env.heal();
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive});
  for (std::int64_t index = 0; index < 5000; ++index) env.inject(index, {.error = EINTR});
  expect_errno(EINTR, [&] { write_fully(*file, "text", 4, 0); });
}

TEST_F(Recording, ShortWritesAreContinued) {
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive});
  env.clear();
  env.inject(0, {.short_bytes = 3});
  env.inject(1, {.short_bytes = 2});
  env.inject(2, {.short_bytes = 100});  // more than is left: no fault
  write_fully(*file, "0123456789", 10, 5);
  EXPECT_EQ(contents("a"), std::string(5, '\0') + "0123456789");
  const std::vector<Operation> done = env.operations();
  ASSERT_EQ(done.size(), 3U);
  EXPECT_EQ(done[0].data, "012");
  EXPECT_EQ(done[1].data, "34");
  EXPECT_EQ(done[1].offset, 8);
  EXPECT_EQ(done[2].data, "56789");
}

TEST_F(Recording, AShortWriteOfADirectFileGoesOnFromABoundary) {
  alignas(4096) static std::array<char, 16384> block;
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<char>(i / 512);
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive, true});
  EXPECT_EQ(file->direct_alignment(), 4096);
  env.clear();
  env.inject(0, {.short_bytes = 5000});
  env.inject(1, {.short_bytes = 7});
  write_fully(*file, block.data(), 16384, 4096);
  EXPECT_EQ(contents("a").substr(4096), std::string(block.data(), block.size()));
  const std::vector<Operation> done = env.operations();
  ASSERT_EQ(done.size(), 3U);
  EXPECT_EQ(done[1].offset, 8192);
  EXPECT_EQ(done[2].offset, 8192);
  EXPECT_EQ(done[2].size_bytes, 12288);
}

TEST_F(Recording, WritesWithoutProgressEnd) {
  alignas(4096) static std::array<char, 4096> block{};
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive, true});
  env.inject(0, {.short_bytes = 7, .is_sticky = true});
  expect_errno(EIO, [&] { write_fully(*file, block.data(), 4096, 0); });
}

TEST_F(Recording, DirectFilesAreHeldToTheirAlignment) {
  alignas(4096) static std::array<char, 8192> block{};
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive, true});
  EXPECT_EQ(file->pwrite(block.data(), 4096, 512), -EINVAL);
  EXPECT_EQ(file->pwrite(block.data(), 512, 0), -EINVAL);
  EXPECT_EQ(file->pwrite(block.data() + 512, 4096, 0), -EINVAL);
  EXPECT_EQ(file->pread(block.data() + 512, 4096, 0), -EINVAL);
  EXPECT_EQ(file->pwrite(block.data(), 4096, 0), 4096);
  EXPECT_EQ(file->pread(block.data(), 4096, 0), 4096);
  env.refuse_direct(true);
  const auto buffered = env.open(at("a"), {OpenMode::kWriteExisting, true});
  EXPECT_EQ(buffered->direct_alignment(), 0);
  EXPECT_EQ(buffered->pwrite(block.data() + 1, 3, 5), 3);
}

TEST_F(Recording, AnErrorCanLeaveAPartBehind) {
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive});
  env.clear();
  env.inject(0, {.error = EIO, .short_bytes = 4});
  expect_errno(EIO, [&] { write_fully(*file, "0123456789", 10, 0); });
  EXPECT_EQ(contents("a"), "0123");
  EXPECT_EQ(env.operations()[0].data, "0123");
  EXPECT_EQ(env.operations()[0].error, EIO);
}

TEST_F(Recording, StickyFaultsHoldUntilHealed) {
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive});
  env.inject(1, {.error = ENOSPC, .is_sticky = true});
  write_fully(*file, "a", 1, 0);
  for (int i = 0; i < 3; ++i) expect_errno(ENOSPC, [&] { write_fully(*file, "b", 1, 1); });
  expect_errno(ENOSPC, [&] { file->sync(); });
  expect_errno(ENOSPC, [&] { env.make_directory(at("d")); });
  EXPECT_EQ(env.read_file(at("a"), 10), "a");
  env.heal();
  write_fully(*file, "c", 1, 1);
  EXPECT_EQ(contents("a"), "ac");
}

TEST_F(Recording, AllocationIsRefusedAsFileSystemsDo) {
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive});
  for (const int error : {EOPNOTSUPP, EINVAL, ENOSYS}) {
    env.inject(0, {.error = error});
    EXPECT_FALSE(file->allocate(0, 4096));
  }
  env.inject(0, {.error = ENOSPC});
  expect_errno(ENOSPC, [&] { file->allocate(0, 4096); });
}

TEST_F(Recording, FaultsThatAreNoneAreRefused) {
  for (const Fault& fault : {Fault{}, Fault{.error = -5}, Fault{.error = 5, .short_bytes = -1}}) {
    expect_error(ErrorKind::kBadValue, {"injected fault"}, [&] { env.inject(0, fault); });
  }
  expect_error(ErrorKind::kBadValue, {"index from 0", "-1"}, [&] { env.inject(-1, {.error = 5}); });
}

TEST_F(Recording, DroppedSyncsAreNeitherDoneNorCounted) {
  env.drop_syncs(true, false);
  env.inject(3, {.error = EIO});
  env.write_file(at("a"), "x", {});
  env.sync_directory(directory());
  expect_errno(EIO, [&] { env.remove(at("a")); });
  EXPECT_EQ(kinds(), (Kinds{"create", "write", "sync_directory", "remove"}));
  env.clear();
  env.drop_syncs(false, true);
  env.write_file(at("a"), "x", {});
  env.sync_directory(directory());
  EXPECT_EQ(kinds(), (Kinds{"truncate", "write", "sync"}));
}

TEST_F(Recording, NewDirectoriesAreSyncedIntoTheirParents) {
  env.make_directories(at("x/y/z"));
  ASSERT_EQ(kinds(), (Kinds{"make_directory", "sync_directory", "make_directory", "sync_directory",
                            "make_directory", "sync_directory"}));
  const std::vector<Operation> done = env.operations();
  EXPECT_EQ(done[1].path, directory());
  EXPECT_EQ(done[2].path, at("x/y"));
  EXPECT_EQ(done[3].path, at("x"));
  EXPECT_EQ(done[3].file, done[0].file);
}

TEST_F(Recording, SmallFilesAreSyncedUnlessAskedNotToBe) {
  env.write_file(at("a"), "x", {.exclusive = true});
  env.write_file(at("b"), "x", {.exclusive = true, .sync = false});
  EXPECT_EQ(kinds(), (Kinds{"create", "write", "sync", "create", "write"}));
}

TEST_F(Recording, LocksLookAgainWhereTheFileWasReplaced) {
  // Replaces the file under the lock's name just after it was locked, once.
  class ReplacingEnv final : public Env {
   public:
    ReplacingEnv(std::string name) : name_(std::move(name)) {}
    int open_once(const std::string& path, OpenOptions options,
                  std::unique_ptr<File>& file) override {
      const int result = posix_env().open_once(path, options, file);
      if (num_left > 0 && result == 0) {
        --num_left;
        posix_env().write_file(name_ + ".new", "new", {.sync = false});
        posix_env().rename(name_ + ".new", name_);
      }
      return result;
    }
    int make_directory_once(const std::string&) override { return -ENOSYS; }
    int rename_once(const std::string&, const std::string&) override { return -ENOSYS; }
    int remove_once(const std::string&) override { return -ENOSYS; }
    int remove_directory_once(const std::string&) override { return -ENOSYS; }
    int sync_directory_once(const std::string&) override { return -ENOSYS; }
    int list_directory_once(const std::string&, std::vector<std::string>&) override {
      return -ENOSYS;
    }
    int status_once(const std::string& path, FileStatus& status) override {
      return posix_env().status_once(path, status);
    }
    int num_left = 1;

   private:
    std::string name_;
  };
  posix_env().write_file(at("a"), "old", {});
  ReplacingEnv replacing(at("a"));
  const auto lock = replacing.lock_file(at("a"), LockKind::kShared);
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(lock->status().inode, posix_env().status(at("a"))->inode);
  replacing.num_left = 1 << 20;
  expect_errno(EBUSY, [&] { (void)replacing.lock_file(at("a"), LockKind::kShared); });
}

TEST_F(Recording, WritersOfManyThreadsAreInOneOrder) {
  const auto file = env.open(at("a"), {OpenMode::kCreateExclusive});
  env.clear();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&file, thread] {
      const std::string text(100, static_cast<char>('a' + thread));
      for (int i = 0; i < 50; ++i) write_fully(*file, text.data(), 100, 50 * (i % 3));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string replayed(200, '\0');
  for (const Operation& operation : env.operations()) {
    replayed.replace(static_cast<std::size_t>(operation.offset), operation.data.size(),
                     operation.data);
  }
  EXPECT_EQ(env.operations().size(), 200U);
  EXPECT_EQ(contents("a"), replayed);
}

TEST_F(Recording, DataIsNotKeptWhereNotAskedFor) {
  RecordingEnv slim(posix_env(), false);
  slim.write_file(at("a"), "text", {});
  EXPECT_EQ(slim.operations()[1].data, "");
  EXPECT_EQ(slim.operations()[1].size_bytes, 4);
}

TEST_F(Recording, FilesOutliveTheirEnv) {
  std::unique_ptr<File> file;
  {
    RecordingEnv gone(posix_env());
    file = gone.open(at("a"), {OpenMode::kCreateExclusive});
  }
  write_fully(*file, "text", 4, 0);
  EXPECT_EQ(contents("a"), "text");
}

}  // namespace
}  // namespace tradewind
