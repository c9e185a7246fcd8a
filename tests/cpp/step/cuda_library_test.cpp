#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "base/error_matching.h"
#include "step/cuda/library.h"

namespace tradewind {
namespace {

void expect_refused(const std::string& path, std::initializer_list<std::string> parts) {
  expect_error(ErrorKind::kBadState, parts, [&] { const CudaLibrary library(path); });
}

TEST(CudaLibrary, AWrongPathIsNamed) {
  expect_refused("/no/such/libtradewind_cuda.so",
                 {"/no/such/libtradewind_cuda.so", "could not be opened", "make gpu"});
}

TEST(CudaLibrary, AFileThatIsNoLibraryIsNamed) {
  const std::string path = testing::TempDir() + "tradewind_no_library.so";
  std::ofstream(path) << "this is text";
  expect_refused(path, {path, "could not be opened", "make gpu"});
  std::remove(path.c_str());
}

TEST(CudaLibrary, ALibraryOfSomethingElseIsNamed) {
  expect_refused("libm.so.6", {"libm.so.6", "tradewind_cuda_interface_version", "make gpu"});
}

TEST(CudaLibrary, AnotherInterfaceVersionIsRefused) {
  expect_refused(FAKE_CUDA_ANOTHER,
                 {FAKE_CUDA_ANOTHER, std::to_string(TRADEWIND_CUDA_INTERFACE_VERSION),
                  std::to_string(TRADEWIND_CUDA_INTERFACE_VERSION + 1), "make gpu"});
}

TEST(CudaLibrary, TheRightOneIsOpenedAndItsErrorsHaveAText) {
  const CudaLibrary library(FAKE_CUDA_THIS);
  int num_devices = 0;
  int capability = 0;
  EXPECT_EQ(library.probe(&num_devices, &capability), 0);
  EXPECT_EQ(num_devices, 2);
  EXPECT_EQ(capability, 90);
  EXPECT_EQ(library.adamw(nullptr, 0, nullptr, 0, 1.0F, nullptr, nullptr), 0);
  library.check(0, "nothing");
  expect_error(ErrorKind::kBadState, {"sweep of 'w'", "700", "the text of an error"},
               [&] { library.check(700, "sweep of 'w'"); });
}

TEST(CudaLibrary, TheRealOneAnswersWhereThereIsNoGpu) {
#ifndef TRADEWIND_CUDA_LIBRARY
  GTEST_SKIP() << "libtradewind_cuda was not built here (nvcc, TRADEWIND_CUDA)";
#else
  const CudaLibrary library(TRADEWIND_CUDA_LIBRARY);
  int num_devices = -1;
  int capability = -1;
  const int code = library.probe(&num_devices, &capability);
  if (code == 0) GTEST_SKIP() << num_devices << " GPUs answer here";
  EXPECT_TRUE(code == 35 || code == 100) << code << ": " << library.error_text(code);
  EXPECT_EQ(num_devices, 0);
  EXPECT_FALSE(std::string(library.error_text(code)).empty());
  expect_error(ErrorKind::kBadState, {"probe", std::to_string(code)},
               [&] { library.check(code, "probe"); });
#endif
}

}  // namespace
}  // namespace tradewind
