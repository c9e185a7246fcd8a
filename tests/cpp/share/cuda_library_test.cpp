// The library's part for sharing. What is wrong with a file: step/cuda_library_test.cpp.
#include <gtest/gtest.h>

#include "base/error_matching.h"
#include "share/cuda/library.h"
#include "share/share_values.h"

namespace tradewind {
namespace {

TEST(ShareCudaLibrary, ALibraryOfSomethingElseIsNamed) {
  expect_error(ErrorKind::kBadState, {"libm.so.6", "tradewind_cuda_share_version", "make gpu"},
               [] { const ShareCudaLibrary library("libm.so.6"); });
}

TEST(ShareCudaLibrary, AnotherInterfaceVersionIsRefused) {
  expect_error(ErrorKind::kBadState,
               {FAKE_CUDA_ANOTHER, "tradewind_cuda_share_version",
                std::to_string(TRADEWIND_CUDA_SHARE_VERSION),
                std::to_string(TRADEWIND_CUDA_SHARE_VERSION + 1), "make gpu"},
               [] { const ShareCudaLibrary library(FAKE_CUDA_ANOTHER); });
}

TEST(ShareCudaLibrary, TheRightOneIsOpenedAndItsErrorsHaveAText) {
  const ShareCudaLibrary library(FAKE_CUDA_THIS);
  EXPECT_EQ(library.encode(nullptr, nullptr, nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(library.decode(nullptr, nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(library.sum(nullptr, nullptr, 0, 1.0, nullptr, nullptr), 0);
  library.check(0, "nothing");
  expect_error(ErrorKind::kBadState, {"encode of 'w'", "700", "the text of an error"},
               [&] { library.check(700, "encode of 'w'"); });
}

// The very sources of the real one, over an emulated grid.
TEST(ShareCudaLibrary, TheEmulatedOneSendsValuesAndBack) {
  const ShareCudaLibrary library(TRADEWIND_CUDA_EMULATED);
  const std::vector<float> values{127.0F, -3.0F, 0.0F, 64.0F, 1.0F};
  const TradewindCudaRun run{5, static_cast<int>(Codec::kInt8), static_cast<int>(DType::kFloat32)};
  std::vector<std::uint32_t> wire(3);
  std::vector<float> decoded(5);
  library.check(library.encode(&run, values.data(), nullptr, wire.data(), nullptr), "encode");
  library.check(library.decode(&run, wire.data(), decoded.data(), nullptr), "decode");
  EXPECT_EQ(decoded, values);
  const TradewindCudaPart parts[] = {{wire.data(), 0}, {values.data(), 1}};
  library.check(library.sum(&run, parts, 2, 2.0, decoded.data(), nullptr), "sum");
  EXPECT_EQ(decoded, values);
}

TEST(ShareCudaLibrary, TheRealOneHasEveryFunction) {
#ifndef TRADEWIND_CUDA_LIBRARY
  GTEST_SKIP() << "libtradewind_cuda was not built here (nvcc, TRADEWIND_CUDA)";
#else
  const ShareCudaLibrary library(TRADEWIND_CUDA_LIBRARY);
  const TradewindCudaRun run{0, static_cast<int>(Codec::kInt8), static_cast<int>(DType::kFloat64)};
  EXPECT_EQ(library.encode(&run, nullptr, nullptr, nullptr, nullptr), 1);
#endif
}

}  // namespace
}  // namespace tradewind
