#include "base/cuda/library_file.h"

#include <dlfcn.h>

#include "base/error.h"

namespace tradewind {

CudaLibraryFile::CudaLibraryFile(const std::string& path, const char* version_function, int version)
    : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) {
    fail(ErrorKind::kBadState, path, ": could not be opened (", dlerror(),
         "); build it with nvcc on the PATH: make gpu");
  }
  int (*found_version)() = nullptr;
  find(version_function, found_version);
  if (found_version() != version) {
    fail(ErrorKind::kBadState, path, ": expected interface version ", version, " of ",
         version_function, ", found ", found_version(), "; rebuild with: make gpu");
  }
  find("tradewind_cuda_error_text", error_text);
}

void* CudaLibraryFile::address_of(const char* name) const {
  void* address = dlsym(handle_, name);
  if (address == nullptr) {
    fail(ErrorKind::kBadState, path_, ": expected the function ", name,
         ", found none; rebuild with: make gpu");
  }
  return address;
}

void CudaLibraryFile::check(int code, const char* subject) const {
  if (code != 0) {
    fail(ErrorKind::kBadState, subject, ": CUDA error ", code, ", ", error_text(code));
  }
}

}  // namespace tradewind
