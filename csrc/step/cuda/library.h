// libtradewind_cuda, opened at run time. Open it only where a GPU answers; it stays open for the
// life of the process. Thread-safe after construction.
#pragma once

#include <string>

#include "step/cuda/interface.h"

namespace tradewind {

class CudaLibrary {
 public:
  // Throws Error(kBadState) naming the file, the reason and the command that builds it.
  explicit CudaLibrary(const std::string& path);
  CudaLibrary(const CudaLibrary&) = delete;
  CudaLibrary& operator=(const CudaLibrary&) = delete;

  // The functions of interface.h, without their prefix. Each answers with a CUDA error code.
  decltype(&tradewind_cuda_probe) probe = nullptr;
  decltype(&tradewind_cuda_ingest) ingest = nullptr;
  decltype(&tradewind_cuda_measure) measure = nullptr;
  decltype(&tradewind_cuda_combine) combine = nullptr;
  decltype(&tradewind_cuda_control) control = nullptr;
  decltype(&tradewind_cuda_sweep) sweep = nullptr;
  decltype(&tradewind_cuda_combine_changes) combine_changes = nullptr;
  decltype(&tradewind_cuda_error_text) error_text = nullptr;

  // Throws Error(kBadState) with CUDA's text unless code is 0.
  void check(int code, const char* subject) const;
};

}  // namespace tradewind
