#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>

#include "arena/memory.h"

namespace tradewind {
namespace {

using Fork = ArenaMemory::Fork;

// Why a hidden arena may leave no hole in a child of this process; null where it does.
#if !defined(MADV_DONTFORK) || !defined(MAP_FIXED_NOREPLACE)
constexpr const char* kNoHole = "this system has no MADV_DONTFORK or no MAP_FIXED_NOREPLACE";
#elif defined(__SANITIZE_THREAD__)
constexpr const char* kNoHole =
    "ThreadSanitizer maps memory of its own in a child, often in the hole";
#else
constexpr const char* kNoHole = nullptr;
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0
#endif

// Runs body() in a forked child that exits with what it returns, and gives waitpid's status.
template <class Body>
int status_of_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer would turn the signal into an exit code
    alarm(60);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

void expect_exit(int status, int code) {
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), code);
}

int read_byte(const ArenaMemory& memory, std::int64_t offset) {
  return static_cast<int>(*static_cast<volatile std::byte*>(memory.data() + offset));
}

class ArenaMemoryFork : public testing::TestWithParam<std::int64_t> {};

TEST_P(ArenaMemoryFork, AChildReadsASharedArena) {
  const ArenaMemory memory(GetParam(), Fork::kShare);
  memory.data()[GetParam() - 1] = std::byte{42};
  expect_exit(status_of_child([&] { return read_byte(memory, GetParam() - 1); }), 42);
}

TEST_P(ArenaMemoryFork, AChildsWritesStayItsOwn) {
  const ArenaMemory memory(GetParam(), Fork::kShare);
  memory.data()[0] = std::byte{1};
  expect_exit(status_of_child([&] {
                memory.data()[0] = std::byte{2};
                return 0;
              }),
              0);
  EXPECT_EQ(memory.data()[0], std::byte{1});
}

TEST_P(ArenaMemoryFork, AChildCannotSeeAHiddenArena) {
  if (kNoHole != nullptr) GTEST_SKIP() << kNoHole;
  const ArenaMemory memory(GetParam(), Fork::kHide);
  memory.data()[0] = std::byte{42};
  for (const std::int64_t offset : {std::int64_t{0}, GetParam() - 1}) {
    const int status = status_of_child([&] { return read_byte(memory, offset); });
    ASSERT_TRUE(WIFSIGNALED(status)) << "exit code " << WEXITSTATUS(status);
    EXPECT_EQ(WTERMSIG(status), SIGSEGV);
  }
  EXPECT_EQ(memory.data()[0], std::byte{42});
}

TEST_P(ArenaMemoryFork, AChildsDestructorUnmapsNothing) {
  auto memory = std::make_unique<ArenaMemory>(GetParam(), Fork::kShare);
  memory->data()[0] = std::byte{7};
  expect_exit(status_of_child([&] {
                volatile std::byte* const address = memory->data();
                memory.reset();
                return static_cast<int>(*address);
              }),
              7);
  EXPECT_EQ(memory->data()[0], std::byte{7});
}

// What a child maps where the hidden arena lay is the child's own: the destructor must not take it.
TEST_P(ArenaMemoryFork, AChildMayReuseTheAddressesOfAHiddenArena) {
  if (kNoHole != nullptr) GTEST_SKIP() << kNoHole;
  auto memory = std::make_unique<ArenaMemory>(GetParam(), Fork::kHide);
  expect_exit(status_of_child([&] {
                void* const wanted = memory->data();
                void* const mapped = mmap(wanted, 4096, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                if (mapped != wanted) return 1;
                auto* const byte = static_cast<volatile unsigned char*>(mapped);
                *byte = 9;
                memory.reset();
                return static_cast<int>(*byte);
              }),
              9);
}

TEST_P(ArenaMemoryFork, AChildsExitLeavesTheParentsArena) {
  const ArenaMemory memory(GetParam(), Fork::kHide);
  memory.data()[GetParam() - 1] = std::byte{3};
  expect_exit(status_of_child([] { return 0; }), 0);
  EXPECT_EQ(memory.data()[GetParam() - 1], std::byte{3});
}

INSTANTIATE_TEST_SUITE_P(SmallAndLarge, ArenaMemoryFork,
                         testing::Values(std::int64_t{4096}, std::int64_t{5} << 20));

}  // namespace
}  // namespace tradewind
