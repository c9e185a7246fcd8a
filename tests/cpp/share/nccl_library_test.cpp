#include "share/nccl_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "base/error_matching.h"

namespace tradewind {
namespace {

using Paths = std::vector<std::string>;

void expect_refused(const Paths& paths, std::initializer_list<std::string> parts) {
  expect_error(ErrorKind::kBadState, parts, [&] { const NcclLibrary library(paths); });
}

TEST(NcclLibrary, EveryPathThatWasTriedIsNamed) {
  const std::string text = testing::TempDir() + "tradewind_no_nccl.so";
  std::ofstream(text) << "this is text";
  expect_refused({"/no/such/libnccl.so.2", text}, {"tried 2 paths", "/no/such/libnccl.so.2",
                                                   text + ":", "pass the path of its libnccl"});
  std::remove(text.c_str());
  expect_refused({}, {"tried 0 paths"});
}

TEST(NcclLibrary, ALibraryOfSomethingElseIsNamed) {
  expect_refused({"libm.so.6"}, {"libm.so.6", "ncclGetVersion", "install"});
}

TEST(NcclLibrary, AFunctionThatLacksIsNamed) {
  expect_refused({NCCL_STANDIN_BROKEN}, {NCCL_STANDIN_BROKEN, "ncclAllReduce", "2.28.9"});
}

TEST(NcclLibrary, AVersionThatIsTooOldIsNamed) {
  expect_refused({NCCL_STANDIN_ANCIENT}, {NCCL_STANDIN_ANCIENT, "2.14.0", "found 2.8.4"});
}

TEST(NcclLibrary, ANewOneHasEveryFeature) {
  const NcclLibrary library({NCCL_STANDIN});
  EXPECT_EQ(library.path(), NCCL_STANDIN);
  EXPECT_EQ(library.version(), 22809);
  EXPECT_EQ(library.version_text(), "2.28.9");
  EXPECT_TRUE(library.has_registration());
  EXPECT_TRUE(library.has_allocation());
  EXPECT_TRUE(library.has_shrink());
  EXPECT_TRUE(library.has_pre_mul_sum());
  EXPECT_NE(library.text_of(nccl::kRemoteError).find("NCCL error 6, remote process exited"),
            std::string::npos);
}

TEST(NcclLibrary, WhatAnOldOneLacksIsNamedWhenItIsUsed) {
  const NcclLibrary library({NCCL_STANDIN_OLD});
  EXPECT_EQ(library.version_text(), "2.18.5");
  EXPECT_FALSE(library.has_registration());
  EXPECT_FALSE(library.has_allocation());
  EXPECT_FALSE(library.has_shrink());
  EXPECT_FALSE(library.has_pre_mul_sum());
  library.require(true, "nothing", "2.0");
  expect_error(ErrorKind::kBadState, {"shrinking a group", "2.27", "2.18.5", NCCL_STANDIN_OLD},
               [&] { library.require(library.has_shrink(), "shrinking a group", "2.27"); });
}

TEST(NcclLibrary, TheOneThatIsLoadedComesFirst) {
  ASSERT_NE(dlopen(NCCL_STANDIN_LOADED, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  const NcclLibrary library({"/no/such/libnccl.so.2", NCCL_STANDIN_UNUSED, NCCL_STANDIN_LOADED});
  EXPECT_EQ(library.path(), NCCL_STANDIN_LOADED);
  EXPECT_EQ(dlopen(NCCL_STANDIN_UNUSED, RTLD_NOW | RTLD_NOLOAD), nullptr);
}

TEST(NcclLibrary, TheFirstThatOpensIsTakenWhereNoneIsLoaded) {
  const NcclLibrary library({"/no/such/libnccl.so.2", NCCL_STANDIN});
  EXPECT_EQ(library.path(), NCCL_STANDIN);
}

TEST(NcclLibrary, TheRealOneIsBound) {
  const char* path = std::getenv("TRADEWIND_NCCL_LIBRARY");
  if (path == nullptr) GTEST_SKIP() << "set TRADEWIND_NCCL_LIBRARY to a libnccl.so.2";
  const NcclLibrary library({path});
  EXPECT_GE(library.version(), 21400);
  EXPECT_EQ(library.has_registration(), library.version() >= 21900);
  EXPECT_EQ(library.has_shrink(), library.version() >= 22700);
  EXPECT_TRUE(library.has_pre_mul_sum());
  EXPECT_NE(library.text_of(nccl::kRemoteError).find("remote"), std::string::npos);
}

}  // namespace
}  // namespace tradewind
