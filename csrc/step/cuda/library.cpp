#include "step/cuda/library.h"

namespace tradewind {

CudaLibrary::CudaLibrary(const std::string& path)
    : CudaLibraryFile(path, "tradewind_cuda_interface_version", TRADEWIND_CUDA_INTERFACE_VERSION) {
  find("tradewind_cuda_probe", probe);
  find("tradewind_cuda_ingest", ingest);
  find("tradewind_cuda_measure", measure);
  find("tradewind_cuda_combine", combine);
  find("tradewind_cuda_control", control);
  find("tradewind_cuda_sweep", sweep);
  find("tradewind_cuda_combine_changes", combine_changes);
}

}  // namespace tradewind
