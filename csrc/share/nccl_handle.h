// One ncclComm_t of the kind whose calls return at once, and the waits on it that end. NCCL itself
// waits in abort and shrink: those run on threads of their own. Belongs to the process that made
// it: in a forked child calls are refused and the destructor does nothing. check() and abort() from
// any thread, the rest from one at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "share/deadline.h"
#include "share/nccl_library.h"

namespace tradewind {

class NcclHandle {
 public:
  // What the destructor gives an abort.
  static constexpr std::chrono::seconds kLastWait{5};

  // Makes the text that an error begins with; only called for one.
  using What = std::function<std::string()>;
  using Call = std::function<nccl::Result(nccl::CommHandle)>;

  // `member` is for the text of errors: "rank 1 of 4".
  NcclHandle(std::shared_ptr<const NcclLibrary> library, std::string member);
  // Aborts unless closed or aborted.
  ~NcclHandle() noexcept;
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  // All below throw Error(kBadState) where NCCL refuses, at the deadline, and where this was ended.

  // Joins a group by its id, with the calling thread's device.
  void join(const nccl::UniqueId& id, int rank, int size, Deadline deadline);
  // Becomes one of the survivors of `parent`, whose queued work is given up.
  void shrink_from(NcclHandle& parent, std::vector<int> excluded, Deadline deadline);

  // Makes a call of NCCL and waits until it has been queued.
  void run(const What& what, Deadline deadline, const Call& call);
  // Within a group NCCL answers at the group's end: without that wait.
  void run_in_group(const What& what, const Call& call);
  // Throws where the group has failed. Never waits.
  void check(const What& what);

  // Waits until every rank closes.
  void close(Deadline deadline);
  // Gives up what is queued, here alone. Does nothing the second time.
  void abort(Deadline deadline);
  void abort_quietly(Deadline deadline) noexcept;

  [[nodiscard]] const NcclLibrary& library() const noexcept { return *library_; }

 private:
  // NCCL's threads write it as late as they end, so it outlives this where they are left behind.
  using Slot = std::shared_ptr<nccl::CommHandle>;

  nccl::CommHandle usable(const What& what) const;
  nccl::Result locked_call(const What& what, const Call& call);
  nccl::Result poll(const What& what);
  void wait_ready(const What& what, Deadline deadline, nccl::Result result);
  [[noreturn]] void fail_call(const What& what, nccl::Result result) const;
  [[noreturn]] void fail_late(const What& what, const char* remedy) const;

  std::shared_ptr<const NcclLibrary> library_;
  std::string member_;
  Slot slot_;
  Slot shrunk_slot_;                // of the one that is made from this
  std::mutex mutex_;                // held for a call of NCCL, never for a wait
  const char* ended_by_ = nullptr;  // how it was ended; by the mutex
  pid_t owner_pid_;
};

}  // namespace tradewind
