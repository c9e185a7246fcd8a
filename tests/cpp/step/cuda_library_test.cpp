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
  EXPECT_EQ(library.ingest(nullptr, nullptr, nullptr, 0, 0, nullptr), 0);
  EXPECT_EQ(library.measure(nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(library.combine(nullptr, nullptr), 0);
  EXPECT_EQ(library.control(nullptr, nullptr), 0);
  EXPECT_EQ(library.sweep(nullptr, nullptr, 0, 0, TRADEWIND_CUDA_UPDATE, 0, nullptr), 0);
  EXPECT_EQ(library.combine_changes(nullptr, nullptr, nullptr), 0);
  library.check(0, "nothing");
  expect_error(ErrorKind::kBadState, {"sweep of 'w'", "700", "the text of an error"},
               [&] { library.check(700, "sweep of 'w'"); });
}

// The very sources of the real one, over an emulated grid.
TEST(CudaLibrary, TheEmulatedOneHasEveryFunction) {
  const CudaLibrary library(TRADEWIND_CUDA_EMULATED);
  TradewindCudaControl control{};
  control.settings.gradient_multiplier = 0.25;
  TradewindCudaTable table{};
  const std::int64_t first_blocks[] = {0};
  table.first_blocks = first_blocks;
  table.control = &control;
  library.check(library.ingest(&table, nullptr, nullptr, 0, 0, nullptr), "ingest");
  library.check(library.measure(&table, nullptr, nullptr), "measure");
  library.check(library.combine(&table, nullptr), "combine");
  library.check(library.control(&table, nullptr), "control");
  library.check(library.sweep(&table, nullptr, 0, 0, TRADEWIND_CUDA_UPDATE, 0, nullptr), "sweep");
  library.check(library.combine_changes(&table, nullptr, nullptr), "combine_changes");
  EXPECT_EQ(control.state.num_steps, 1);
  EXPECT_EQ(control.outcome.gradient_multiplier, 0.25);
  EXPECT_EQ(control.outcome.first_nonfinite_slot, -1);
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
