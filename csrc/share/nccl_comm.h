// A Comm over NCCL. Every call returns when NCCL has queued it or at a deadline, so a rank that is
// gone shows as an Error, never as a hang. One Comm has one device; memory and streams are that
// device's. Belongs to the process that made it.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "share/comm.h"
#include "share/nccl_handle.h"
#include "share/nccl_library.h"
#include "share/nccl_memory.h"

namespace tradewind {

struct NcclOptions {
  // Whether a stream has passed all that was queued on it: cudaStreamQuery. May throw.
  std::function<bool(void* stream)> is_stream_done;
  // For NCCL to queue a call; the first with a peer also connects to it.
  std::chrono::milliseconds call_timeout{60'000};
};

class NcclComm final : public Comm {
 public:
  // An id for one group, for rank 0 to make and hand to all. Throws Error(kBadState).
  static nccl::UniqueId make_id(const NcclLibrary& library);

  // Every rank calls it, on a thread whose current device is the rank's own. Throws
  // Error(kBadState) where not all have come by the deadline.
  NcclComm(std::shared_ptr<const NcclLibrary> library, const nccl::UniqueId& id, int rank, int size,
           NcclOptions options, Deadline deadline);

  // The group of those ranks of this one that are not excluded, in the same order: each of them
  // calls it with the same list. Work that is queued here is given up, and this Comm is aborted
  // whether or not it succeeds. Throws Error(kBadState) where NCCL is too old (2.27).
  std::unique_ptr<NcclComm> shrink(std::vector<int> excluded, Deadline deadline);

  // Waits until every rank closes, for a quiet end: the destructor aborts.
  void close(Deadline deadline);

  void barrier(void* stream, Deadline deadline) override;
  void wait(void* stream, Deadline deadline) override;
  void group_begin() override;
  void group_end() override;
  // Throw Error(kBadState) where NCCL is too old (2.19).
  MemoryToken register_memory(void* data, std::int64_t num_bytes) override;
  void deregister_memory(MemoryToken token) override;
  // NCCL's asynchronous error, which it finds while work runs: to be asked now and then.
  void check() override;
  void abort(Deadline deadline) override;

 private:
  NcclComm(std::shared_ptr<const NcclLibrary> library, int rank, int size, NcclOptions options);

  void queue(const CommCall& call) override;
  nccl::Result issue(const CommCall& call, nccl::CommHandle comm);
  nccl::Result issue_all_to_all(const CommCall& call, nccl::CommHandle comm) const;
  // The operation that reduces so; made at its first use, for the life of the group.
  nccl::RedOp op_of(const CommCall& call, nccl::CommHandle comm);
  // Makes a call of NCCL, at once or as one of the group that is open.
  void run(const NcclHandle::What& what, const NcclHandle::Call& call);
  // Throws where a group is open, whose calls have not gone out.
  void require_no_group(const NcclHandle::What& what) const;
  void wait_for(void* stream, Deadline deadline, const NcclHandle::What& what);
  [[nodiscard]] std::string member() const;
  // The member, and what it queued last.
  [[nodiscard]] std::string text_of_last();

  std::shared_ptr<const NcclLibrary> library_;
  NcclOptions options_;
  std::unique_ptr<NcclMemory> barrier_memory_;  // outlives the handle, whose work may be on it
  NcclHandle handle_;
  std::array<std::optional<nccl::RedOp>, kNumDTypes> mean_ops_;
  int group_depth_ = 0;
  std::mutex last_mutex_;
  std::optional<CommCall> last_;
};

}  // namespace tradewind
