// The step's functions of libtradewind_cuda.
#pragma once

#include <string>

#include "base/cuda/library_file.h"
#include "step/cuda/interface.h"

namespace tradewind {

class CudaLibrary : public CudaLibraryFile {
 public:
  // Throws Error(kBadState) as CudaLibraryFile does.
  explicit CudaLibrary(const std::string& path);

  // The functions of interface.h, without their prefix. Each answers with a CUDA error code.
  decltype(&tradewind_cuda_probe) probe = nullptr;
  decltype(&tradewind_cuda_ingest) ingest = nullptr;
  decltype(&tradewind_cuda_measure) measure = nullptr;
  decltype(&tradewind_cuda_combine) combine = nullptr;
  decltype(&tradewind_cuda_control) control = nullptr;
  decltype(&tradewind_cuda_sweep) sweep = nullptr;
  decltype(&tradewind_cuda_combine_changes) combine_changes = nullptr;
};

}  // namespace tradewind
