// Sharing's functions of libtradewind_cuda.
#pragma once

#include <string>

#include "base/cuda/library_file.h"
#include "share/cuda/interface.h"

namespace tradewind {

class ShareCudaLibrary : public CudaLibraryFile {
 public:
  // Throws Error(kBadState) as CudaLibraryFile does.
  explicit ShareCudaLibrary(const std::string& path);

  // The functions of interface.h, without their prefix. Each answers with a CUDA error code.
  decltype(&tradewind_cuda_encode) encode = nullptr;
  decltype(&tradewind_cuda_decode) decode = nullptr;
  decltype(&tradewind_cuda_sum) sum = nullptr;
};

}  // namespace tradewind
