#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/error_matching.h"
#include "base/temporary_directory.h"

namespace tradewind {
namespace {

struct Aligned {
  explicit Aligned(std::size_t size_bytes, char value = 0)
      : bytes(static_cast<char*>(std::aligned_alloc(4096, size_bytes)), &std::free) {
    std::memset(bytes.get(), value, size_bytes);
  }
  std::unique_ptr<char, decltype(&std::free)> bytes;
};

class PosixEnv : public TemporaryDirectory {
 protected:
  static Env& env() { return posix_env(); }

  [[nodiscard]] std::string contents(const std::string& name) const {
    std::ifstream file(at(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  void fill(const std::string& name, const std::string& data) const {
    std::ofstream(at(name), std::ios::binary) << data;
  }
};

template <class Call>
int errno_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kSystem) << error.what();
    EXPECT_EQ(error.system_failure()->error_number, error.error_number());
    return error.error_number();
  }
  return 0;
}

TEST_F(PosixEnv, EveryModeOpensWhatItSays) {
  const auto open = [&](const char* name, OpenMode mode) { return env().open(at(name), {mode}); };
  EXPECT_EQ(errno_of([&] { open("a", OpenMode::kRead); }), ENOENT);
  EXPECT_EQ(errno_of([&] { open("a", OpenMode::kWriteExisting); }), ENOENT);
  write_fully(*open("a", OpenMode::kCreateExclusive), "hello", 5, 0);
  EXPECT_EQ(errno_of([&] { open("a", OpenMode::kCreateExclusive); }), EEXIST);
  EXPECT_EQ(contents("a"), "hello");
  write_fully(*open("a", OpenMode::kWriteExisting), "J", 1, 0);
  EXPECT_EQ(contents("a"), "Jello");
  EXPECT_EQ(errno_of([&] { write_fully(*open("a", OpenMode::kRead), "J", 1, 0); }), EBADF);
  EXPECT_EQ(open("a", OpenMode::kCreateOrTruncate)->status().size_bytes, 0);
  open("b", OpenMode::kCreateOrTruncate);
  EXPECT_TRUE(env().status(at("b"))->is_file);
}

TEST_F(PosixEnv, ErrorsNameTheCallThePathAndTheErrno) {
  try {
    (void)env().open(at("none"), {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.system_failure()->path, at("none"));
    EXPECT_EQ(error.system_failure()->reason, "could not be opened: No such file or directory");
    EXPECT_EQ(error.what(), "could not be opened: No such file or directory: '" + at("none") + "'");
  }
  expect_error(ErrorKind::kSystem, {"could not be renamed to '" + at("new"), at("old")},
               [&] { env().rename(at("old"), at("new")); });
}

TEST_F(PosixEnv, FilesAreNotLeftToPrograms) {
  const auto file = env().open(at("a"), {OpenMode::kCreateExclusive});
  int num_ours = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    if (std::filesystem::read_symlink(entry.path(), ignored) != at("a")) continue;
    ++num_ours;
    std::ifstream info("/proc/self/fdinfo/" + entry.path().filename().string());
    const std::string text{std::istreambuf_iterator<char>(info), {}};
    const auto flags = std::stoul(text.substr(text.find("flags:") + 6), nullptr, 8);
    EXPECT_NE(flags & 02000000U, 0U) << text;  // O_CLOEXEC
  }
  EXPECT_EQ(num_ours, 1);
}

TEST_F(PosixEnv, ReadsEndWhereTheFileEnds) {
  fill("a", "0123456789");
  const auto file = env().open(at("a"), {});
  std::string data(20, '.');
  EXPECT_EQ(read_fully(*file, data.data(), 20, 4), 6);
  EXPECT_EQ(data.substr(0, 8), "456789..");
  EXPECT_EQ(read_fully(*file, data.data(), 3, 1), 3);
  EXPECT_EQ(data.substr(0, 4), "1237");
  EXPECT_EQ(read_fully(*file, data.data(), 3, 10), 0);
  EXPECT_EQ(errno_of([&] { read_fully(*env().open(directory(), {}), data.data(), 3, 0); }), EISDIR);
}

TEST_F(PosixEnv, DirectFilesGoAroundTheCacheOrAreBuffered) {
  const auto file = env().open(at("a"), {OpenMode::kCreateExclusive, true});
  const std::int64_t alignment = file->direct_alignment();
  ASSERT_GE(alignment, 0);
  ASSERT_LE(alignment, 4096);
  Aligned block(8192, 'x');
  write_fully(*file, block.bytes.get(), 8192, 4096);
  file->sync();
  EXPECT_EQ(file->status().size_bytes, 12288);
  file->truncate(10000);
  EXPECT_EQ(contents("a"), std::string(4096, '\0') + std::string(10000 - 4096, 'x'));
  // The last, unaligned piece of a file is read whole, and ends the reading.
  Aligned read(16384, '.');
  const auto reader = env().open(at("a"), {OpenMode::kRead, true});
  EXPECT_EQ(read_fully(*reader, read.bytes.get(), 16384, 0), 10000);
  EXPECT_EQ(std::string(read.bytes.get(), 10000), contents("a"));
  EXPECT_EQ(env().open(at("a"), {OpenMode::kRead})->direct_alignment(), 0);
}

// tmpfs takes direct I/O and reports no alignment.
TEST_F(PosixEnv, DirectFilesWorkInSharedMemoryToo) {
  const std::string path = "/dev/shm/tradewind-" + std::to_string(getpid());
  if (access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  const auto file = env().open(path, {OpenMode::kCreateOrTruncate, true});
  const int direct = ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  EXPECT_EQ(file->direct_alignment() > 0, direct >= 0);
  if (direct >= 0) close(direct);
  Aligned block(4096, 'y');
  write_fully(*file, block.bytes.get(), 4096, 0);
  EXPECT_EQ(env().read_file(path, 4096), std::string(4096, 'y'));
  env().remove(path);
}

TEST_F(PosixEnv, AllocationTakesBlocksAndKeepsWhatIsThere) {
  const auto file = env().open(at("a"), {OpenMode::kCreateExclusive});
  write_fully(*file, "abc", 3, 0);
  if (!file->allocate(0, 1 << 20)) GTEST_SKIP() << "this file system allocates nothing in advance";
  struct stat found{};
  ASSERT_EQ(stat(at("a").c_str(), &found), 0);
  EXPECT_EQ(found.st_size, 1 << 20);
  EXPECT_GE(found.st_blocks * 512, 1 << 20);
  EXPECT_EQ(contents("a").substr(0, 4), std::string("abc\0", 4));
}

TEST_F(PosixEnv, AllocationOfTooMuchIsAnError) {
  const auto file = env().open(at("a"), {OpenMode::kCreateExclusive});
  const int error = errno_of([&] {
    if (!file->allocate(0, std::int64_t{1} << 60)) throw Error(SystemFailure{ENOSPC, "", ""});
  });
  EXPECT_TRUE(error == ENOSPC || error == EFBIG) << error;
}

TEST_F(PosixEnv, AllocationThatIsNotSupportedIsNoError) {
  // An invalid length is what some network file systems answer to any.
  const auto file = env().open(at("a"), {OpenMode::kCreateExclusive});
  EXPECT_FALSE(file->allocate(0, 0));
}

TEST_F(PosixEnv, StatusSeesFilesDirectoriesLinksAndNothing) {
  fill("a", "12345");
  std::filesystem::create_hard_link(at("a"), at("b"));
  const FileStatus status = *env().status(at("a"));
  EXPECT_EQ(status.size_bytes, 5);
  EXPECT_EQ(status.num_links, 2);
  EXPECT_TRUE(status.is_file);
  EXPECT_FALSE(status.is_directory);
  EXPECT_GT(status.modified_s, 1.7e9);  // after 2023
  EXPECT_EQ(env().status(at("b"))->inode, status.inode);
  EXPECT_EQ(env().open(at("b"), {})->status().inode, status.inode);
  EXPECT_NE(env().status(directory())->inode, status.inode);
  EXPECT_TRUE(env().status(directory())->is_directory);
  EXPECT_FALSE(env().status(directory())->is_file);
  EXPECT_FALSE(env().status(at("none")).has_value());
  EXPECT_FALSE(env().status(at("a/below")).has_value());
  EXPECT_EQ(errno_of([&] { (void)env().status(at(std::string(300, 'x'))); }), ENAMETOOLONG);
}

TEST_F(PosixEnv, DirectoriesAreMadeWithTheirParents) {
  env().make_directories(at("x/y//z/"));
  env().make_directories(at("x/y/z"));
  EXPECT_TRUE(std::filesystem::is_directory(at("x/y/z")));
  EXPECT_EQ(errno_of([&] { env().make_directory(at("x")); }), EEXIST);
  EXPECT_EQ(errno_of([&] { env().make_directory(at("p/q")); }), ENOENT);
  fill("file", "");
  EXPECT_EQ(errno_of([&] { env().make_directories(at("file")); }), ENOTDIR);
  EXPECT_EQ(errno_of([&] { env().make_directories(at("file/below")); }), ENOTDIR);
  env().sync_directory(at("x/y"));
  EXPECT_EQ(errno_of([&] { env().sync_directory(at("file")); }), ENOTDIR);
  EXPECT_EQ(errno_of([&] { env().remove_directory(at("x")); }), ENOTEMPTY);
  env().remove_directory(at("x/y/z"));
  EXPECT_FALSE(std::filesystem::exists(at("x/y/z")));
}

TEST_F(PosixEnv, NamesAreListedInOrder) {
  for (const char* name : {"b", "a", ".hidden", "\xFF", "A"}) fill(name, "");
  EXPECT_EQ(env().list_directory(directory()),
            (std::vector<std::string>{".hidden", "A", "a", "b", "\xFF"}));
  EXPECT_EQ(errno_of([&] { (void)env().list_directory(at("none")); }), ENOENT);
  EXPECT_EQ(errno_of([&] { (void)env().list_directory(at("a")); }), ENOTDIR);
}

TEST_F(PosixEnv, RenamesReplaceAndRemovalsRemove) {
  fill("a", "new");
  fill("b", "old");
  env().rename(at("a"), at("b"));
  EXPECT_EQ(contents("b"), "new");
  env().remove(at("b"));
  EXPECT_EQ(errno_of([&] { env().remove(at("b")); }), ENOENT);
  EXPECT_TRUE(env().list_directory(directory()).empty());
}

TEST_F(PosixEnv, SmallFilesAreWrittenAndReadWhole) {
  env().write_file(at("a"), "a longer text", {});
  env().write_file(at("a"), "text", {.sync = false});
  EXPECT_EQ(contents("a"), "text");
  EXPECT_EQ(env().read_file(at("a"), 4), "text");
  EXPECT_EQ(env().read_file(at("a"), 1 << 20), "text");
  EXPECT_EQ(errno_of([&] { (void)env().read_file(at("a"), 3); }), EFBIG);
  EXPECT_EQ(errno_of([&] { env().write_file(at("a"), "x", {.exclusive = true}); }), EEXIST);
  EXPECT_EQ(contents("a"), "text");
  env().write_file(at("empty"), "", {.exclusive = true});
  EXPECT_EQ(env().read_file(at("empty"), 0), "");
  expect_error(ErrorKind::kBadValue, {"0 bytes or more", "-1"},
               [&] { (void)env().read_file(at("a"), -1); });
  const std::string zeros_inside("\0a\0", 3);
  env().write_file(at("a"), zeros_inside, {});
  EXPECT_EQ(env().read_file(at("a"), 3), zeros_inside);
}

TEST_F(PosixEnv, FilesWithoutASizeAreReadToTheirEnd) {
  std::ifstream file("/proc/cpuinfo", std::ios::binary);
  if (!file) GTEST_SKIP() << "no /proc/cpuinfo";
  EXPECT_GT(env().read_file("/proc/cpuinfo", 1 << 24).size(), 100U);
}

TEST_F(PosixEnv, AFifoInAFilesPlaceHoldsNobodyUp) {
  ASSERT_EQ(mkfifo(at("fifo").c_str(), 0600), 0);
  EXPECT_EQ(errno_of([&] { (void)env().read_file(at("fifo"), 10); }), ESPIPE);
}

TEST_F(PosixEnv, LocksExcludeOtherOpenFilesAndNeverWait) {
  auto owner = env().lock_file(at("lock"), LockKind::kExclusive);
  ASSERT_NE(owner, nullptr);
  EXPECT_EQ(env().lock_file(at("lock"), LockKind::kExclusive), nullptr);
  EXPECT_EQ(env().lock_file(at("lock"), LockKind::kShared), nullptr);
  owner.reset();
  const auto reader = env().lock_file(at("lock"), LockKind::kShared);
  const auto other_reader = env().lock_file(at("lock"), LockKind::kShared);
  EXPECT_NE(reader, nullptr);
  EXPECT_NE(other_reader, nullptr);
  EXPECT_EQ(env().lock_file(at("lock"), LockKind::kExclusive), nullptr);
  EXPECT_EQ(errno_of([&] { (void)env().lock_file(at("none"), LockKind::kShared); }), ENOENT);
  EXPECT_EQ(errno_of([&] { (void)env().lock_file(at("no/lock"), LockKind::kExclusive); }), ENOENT);
}

// A loader's worker that outlives its killed parent must not hold the directory.
TEST_F(PosixEnv, AForkedChildDoesNotKeepTheLock) {
  auto owner = env().lock_file(at("lock"), LockKind::kExclusive);
  ASSERT_NE(owner, nullptr);
  int to_child[2];
  int from_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(from_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    // The parent still holds it; what the child does to its copy does not matter to the parent.
    const bool is_held = env().lock_file(at("lock"), LockKind::kExclusive) == nullptr;
    owner.reset();
    const bool is_still_held = env().lock_file(at("lock"), LockKind::kExclusive) == nullptr;
    byte = is_held && is_still_held ? 'y' : 'n';
    if (write(from_child[1], &byte, 1) != 1) _exit(1);
    (void)!read(to_child[0], &byte, 1);  // lives on until the parent has looked
    _exit(0);
  }
  char answer = 0;
  ASSERT_EQ(read(from_child[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  owner.reset();
  EXPECT_NE(env().lock_file(at("lock"), LockKind::kExclusive), nullptr);
  ASSERT_EQ(write(to_child[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int end : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(end);
}

TEST_F(PosixEnv, AKilledOwnersLockIsFreeThoughItsChildLives) {
  int parked[2];
  int ready[2];
  ASSERT_EQ(pipe(parked), 0);
  ASSERT_EQ(pipe(ready), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    const auto lock = env().lock_file(at("lock"), LockKind::kExclusive);
    if (fork() == 0) {  // the worker, which ends when the test closes its pipe
      close(parked[1]);
      char byte = 0;
      if (write(ready[1], "w", 1) != 1) _exit(1);
      (void)!read(parked[0], &byte, 1);
      _exit(0);
    }
    pause();
    _exit(lock == nullptr ? 1 : 0);
  }
  close(parked[0]);
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(env().lock_file(at("lock"), LockKind::kExclusive), nullptr);
  ASSERT_EQ(kill(owner, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(owner, &status, 0), owner);
  EXPECT_NE(env().lock_file(at("lock"), LockKind::kExclusive), nullptr);
  for (const int end : {parked[1], ready[0], ready[1]}) close(end);
}

}  // namespace
}  // namespace tradewind
