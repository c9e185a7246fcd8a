// A Comm over a process group of torch's, which carries whatever backend it has for the device:
// Gloo on host memory, NCCL on a GPU's. On host memory a call returns when it is over, and gives up
// at the deadline or as soon as another rank is known to have ended. On a device it is queued: a
// call's stream must be the calling thread's current one, which torch orders its backends by.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>

#include "share/comm.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace tradewind {

struct C10dCommOptions {
  // For one call to end, and on a device for torch's own watchdog.
  std::chrono::milliseconds timeout{300'000};
  // A call on host memory that takes this long is told to on_late.
  std::chrono::milliseconds patience{30'000};
  std::function<void(const std::string&)> on_late = {};
  // What the other ranks said last, for errors.
  std::function<std::string()> others = {};
  // Why another rank has ended; empty where none has. Asked while a call on host memory waits.
  std::function<std::string()> why_ended = {};
};

class C10dComm final : public Comm {
 public:
  C10dComm(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
           C10dCommOptions options);
  ~C10dComm() override;

  void barrier(void* stream, Deadline deadline) override;
  void wait(void* stream, Deadline deadline) override;
  // One call at a time goes out: there is nothing to gain on Gloo, and buckets are large.
  void group_begin() override {}
  void group_end() override {}
  // torch's backends know their memory by themselves.
  MemoryToken register_memory(void*, std::int64_t) override { return {}; }
  void deregister_memory(MemoryToken) override {}
  void check() override;
  // Closes the connections: ranks that are connected to this one notice at once.
  void abort(Deadline deadline) override;
  // A quiet end, of a group whose calls are over on every rank or will be: what other ranks still
  // want of this one goes out first. As abort() otherwise.
  void close(Deadline deadline);

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  void queue(const CommCall& call) override;
  WorkPtr begin(const CommCall& call, c10d::ProcessGroup& group);
  WorkPtr begin_reduction(const CommCall& call, c10d::ProcessGroup& group);
  void reduce_parts(const CommCall& call);
  // Until the work is over, or throws.
  void finish(const CommCall& call, const WorkPtr& work);
  void check_stream(const CommCall& call) const;
  [[nodiscard]] at::Tensor tensor_at(const void* data, std::int64_t num_elements,
                                     at::ScalarType dtype) const;
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> group();
  void let_go(Deadline deadline, bool is_quiet);
  [[noreturn]] void lost(const std::string& doing, const std::string& why);
  [[nodiscard]] at::Tensor barrier_tensor();

  c10::Device device_;
  C10dCommOptions options_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // null once it has failed or was aborted
  std::string failure_;
  std::string last_;  // of the calls
  at::Tensor barrier_;
};

}  // namespace tradewind
