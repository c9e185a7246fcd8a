// libtradewind_cuda as a file: opened at run time, its functions found by name. One library has the
// kernels of every room, each behind an interface with a version of its own. Open it only where a
// GPU answers; it stays open for the life of the process. Thread-safe after construction.
#pragma once

#include <string>

namespace tradewind {

class CudaLibraryFile {
 public:
  // `version_function` tells the version of the interface. Throws Error(kBadState) naming the file,
  // what is wrong with it and the command that builds it.
  CudaLibraryFile(const std::string& path, const char* version_function, int version);
  CudaLibraryFile(const CudaLibraryFile&) = delete;
  CudaLibraryFile& operator=(const CudaLibraryFile&) = delete;

  // CUDA's text for one of its error codes.
  const char* (*error_text)(int code) = nullptr;
  // Throws Error(kBadState) with that text unless code is 0.
  void check(int code, const char* subject) const;

 protected:
  // Throws as the constructor does where there is no such function.
  template <class Function>
  void find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(address_of(name));
  }

 private:
  [[nodiscard]] void* address_of(const char* name) const;

  std::string path_;
  void* handle_;
};

}  // namespace tradewind
