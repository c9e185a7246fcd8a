#include "share/cuda/library.h"

namespace tradewind {

ShareCudaLibrary::ShareCudaLibrary(const std::string& path)
    : CudaLibraryFile(path, "tradewind_cuda_share_version", TRADEWIND_CUDA_SHARE_VERSION) {
  find("tradewind_cuda_encode", encode);
  find("tradewind_cuda_decode", decode);
  find("tradewind_cuda_sum", sum);
}

}  // namespace tradewind
