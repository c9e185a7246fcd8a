// The stand-in's library in a test, with its control entries.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "share/nccl_comm.h"

namespace tradewind {

class NcclStandin {
 public:
  explicit NcclStandin(const std::string& path = NCCL_STANDIN)
      : library(std::make_shared<NcclLibrary>(std::vector<std::string>{path})) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    find(handle, "nccl_standin_stream_is_done", stream_is_done);
    find(handle, "nccl_standin_num_misuses", num_misuses);
    find(handle, "nccl_standin_die_after_chunks", die_after_chunks);
    find(handle, "nccl_standin_set_async_error", set_async_error);
    find(handle, "nccl_standin_delay_aborts", delay_aborts);
  }

  [[nodiscard]] NcclOptions options() const {
    NcclOptions options;
    options.is_stream_done = [ask = stream_is_done](void* stream) { return ask(stream) != 0; };
    return options;
  }

  [[nodiscard]] std::unique_ptr<NcclComm> join(const nccl::UniqueId& id, int rank, int size,
                                               Deadline deadline) const {
    return std::make_unique<NcclComm>(library, id, rank, size, options(), deadline);
  }

  std::shared_ptr<NcclLibrary> library;
  int (*stream_is_done)(void* stream) = nullptr;
  int (*num_misuses)() = nullptr;
  void (*die_after_chunks)(int num_chunks) = nullptr;
  void (*set_async_error)(int error) = nullptr;
  void (*delay_aborts)(int milliseconds) = nullptr;

 private:
  template <class Function>
  static void find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
  }
};

// Long enough for a loaded machine under sanitizers; nothing waits for it where all is well.
inline Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }
inline Deadline after(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

}  // namespace tradewind
