#include "step/cuda/library.h"

#include <dlfcn.h>

#include "base/error.h"

namespace tradewind {
namespace {

template <class Function>
Function find(void* handle, const char* name, const std::string& path) {
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr) {
    fail(ErrorKind::kBadState, path, ": expected the function ", name,
         ", found none; rebuild with: make gpu");
  }
  return reinterpret_cast<Function>(symbol);
}

}  // namespace

CudaLibrary::CudaLibrary(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    fail(ErrorKind::kBadState, path, ": could not be opened (", dlerror(),
         "); build it with nvcc on the PATH: make gpu");
  }
  const auto version = find<decltype(&tradewind_cuda_interface_version)>(
      handle, "tradewind_cuda_interface_version", path);
  if (version() != TRADEWIND_CUDA_INTERFACE_VERSION) {
    fail(ErrorKind::kBadState, path, ": expected interface version ",
         TRADEWIND_CUDA_INTERFACE_VERSION, ", found ", version(), "; rebuild with: make gpu");
  }
  probe = find<decltype(probe)>(handle, "tradewind_cuda_probe", path);
  ingest = find<decltype(ingest)>(handle, "tradewind_cuda_ingest", path);
  measure = find<decltype(measure)>(handle, "tradewind_cuda_measure", path);
  combine = find<decltype(combine)>(handle, "tradewind_cuda_combine", path);
  control = find<decltype(control)>(handle, "tradewind_cuda_control", path);
  sweep = find<decltype(sweep)>(handle, "tradewind_cuda_sweep", path);
  combine_changes = find<decltype(combine_changes)>(handle, "tradewind_cuda_combine_changes", path);
  error_text = find<decltype(error_text)>(handle, "tradewind_cuda_error_text", path);
}

void CudaLibrary::check(int code, const char* subject) const {
  if (code != 0) {
    fail(ErrorKind::kBadState, subject, ": CUDA error ", code, ", ", error_text(code));
  }
}

}  // namespace tradewind
