#include "share/nccl_handle.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "base/error.h"

namespace tradewind {
namespace {

nccl::CommHandle read_slot(nccl::CommHandle& slot) {
  return std::atomic_ref<nccl::CommHandle>(slot).load(std::memory_order_acquire);
}

}  // namespace

NcclHandle::NcclHandle(std::shared_ptr<const NcclLibrary> library, std::string member)
    : library_(std::move(library)),
      member_(std::move(member)),
      slot_(std::make_shared<nccl::CommHandle>(nullptr)),
      owner_pid_(getpid()) {}

NcclHandle::~NcclHandle() noexcept { abort_quietly(std::chrono::steady_clock::now() + kLastWait); }

void NcclHandle::abort_quietly(Deadline deadline) noexcept {
  try {
    abort(deadline);
  } catch (...) {  // left behind with its thread: there is nobody to tell
  }
}

void NcclHandle::join(const nccl::UniqueId& id, int rank, int size, Deadline deadline) {
  const What what = [this] { return "joining the group as " + member_; };
  nccl::Config config;
  try {
    run(what, deadline, [&](nccl::CommHandle) {
      return library_->comm_init_rank_config(slot_.get(), size, id, rank, &config);
    });
  } catch (const Error&) {
    abort_quietly(deadline);
    throw;
  }
}

void NcclHandle::shrink_from(NcclHandle& parent, std::vector<int> excluded, Deadline deadline) {
  const What what = [this] { return "shrinking the group to " + member_; };
  library_->require(library_->has_shrink(), "shrinking a group", "2.27");
  const nccl::CommHandle from = [&] {
    const std::lock_guard lock(parent.mutex_);
    parent.shrunk_slot_ = slot_;
    return parent.usable(what);
  }();
  auto result = std::make_shared<std::atomic<nccl::Result>>(nccl::kInProgress);
  const bool has_returned = returns_within(
      deadline, [library = library_, slot = slot_, result, from, excluded]() mutable {
        *result = library->comm_shrink(from, excluded.data(), static_cast<int>(excluded.size()),
                                       slot.get(), nullptr, nccl::kShrinkAbort);
      });
  if (!has_returned) {
    const std::lock_guard lock(parent.mutex_);
    parent.ended_by_ = "left behind";  // NCCL still reads it
    fail_late(what, "a survivor may be missing: make a new group");
  }
  if (*result != nccl::kSuccess && *result != nccl::kInProgress) fail_call(what, *result);
  // NCCL makes the new one last of all; until then the old one has the answer.
  const bool is_made = poll_until(deadline, [&] {
    if (read_slot(*slot_) != nullptr) return true;
    if (const nccl::Result state = parent.poll(what);
        state != nccl::kSuccess && state != nccl::kInProgress) {
      fail_call(what, state);
    }
    return false;
  });
  if (!is_made) fail_late(what, "a survivor may be missing: make a new group");
  wait_ready(what, deadline, nccl::kInProgress);
}

void NcclHandle::run(const What& what, Deadline deadline, const Call& call) {
  wait_ready(what, deadline, locked_call(what, call));
}

void NcclHandle::run_in_group(const What& what, const Call& call) {
  const nccl::Result result = locked_call(what, call);
  if (result != nccl::kSuccess && result != nccl::kInProgress) fail_call(what, result);
}

void NcclHandle::check(const What& what) {
  const nccl::Result result = poll(what);
  if (result != nccl::kSuccess && result != nccl::kInProgress) fail_call(what, result);
}

void NcclHandle::close(Deadline deadline) {
  if (getpid() != owner_pid_) return;
  const What what = [this] { return "closing " + member_; };
  run(what, deadline, [&](nccl::CommHandle comm) { return library_->comm_finalize(comm); });
  const nccl::Result result = locked_call(what, [&](nccl::CommHandle comm) {
    ended_by_ = "closed";
    return library_->comm_destroy(comm);
  });
  if (result != nccl::kSuccess && result != nccl::kInProgress) fail_call(what, result);
}

void NcclHandle::abort(Deadline deadline) {
  if (getpid() != owner_pid_) return;
  const What what = [this] { return "aborting " + member_; };
  std::unique_lock lock(mutex_, std::defer_lock);
  // Not a timed mutex: ThreadSanitizer does not see that one being locked.
  poll_until(deadline, [&] { return lock.try_lock(); });
  if (!lock.owns_lock()) fail_late(what, "a call of NCCL does not return: end this process");
  const nccl::CommHandle comm = read_slot(*slot_);
  if (ended_by_ != nullptr || comm == nullptr) return;
  ended_by_ = "aborted";
  lock.unlock();
  // Whatever NCCL says of it, there is nothing more to do.
  const bool has_returned =
      returns_within(deadline, [library = library_, slot = slot_, shrunk = shrunk_slot_, comm] {
        library->comm_abort(comm);
      });
  if (!has_returned) fail_late(what, "NCCL does not give up its work: end this process");
}

nccl::CommHandle NcclHandle::usable(const What& what) const {
  if (getpid() != owner_pid_) {
    fail(ErrorKind::kBadState, what(), ": made in process ", owner_pid_, ", used in process ",
         getpid(), "; a fork has no part in a group: make a new one there");
  }
  if (ended_by_ != nullptr) {
    fail(ErrorKind::kBadState, what(), ": ", member_, " was ", ended_by_, "; make a new group");
  }
  return read_slot(*slot_);
}

nccl::Result NcclHandle::locked_call(const What& what, const Call& call) {
  const std::lock_guard lock(mutex_);
  return call(usable(what));
}

nccl::Result NcclHandle::poll(const What& what) {
  return locked_call(what, [&](nccl::CommHandle comm) {
    nccl::Result state = nccl::kSuccess;
    const nccl::Result result = library_->comm_get_async_error(comm, &state);
    return result == nccl::kSuccess ? state : result;
  });
}

void NcclHandle::wait_ready(const What& what, Deadline deadline, nccl::Result result) {
  const bool is_ready = poll_until(deadline, [&] {
    if (result == nccl::kInProgress) result = poll(what);
    return result != nccl::kInProgress;
  });
  if (!is_ready)
    fail_late(what, "a rank may be missing: abort, and go on with those that are left");
  if (result != nccl::kSuccess) fail_call(what, result);
}

void NcclHandle::fail_call(const What& what, nccl::Result result) const {
  const char* remedy = "a rank or its network is gone: abort, and go on with those that are left";
  if (result == nccl::kInvalidArgument || result == nccl::kInvalidUsage) {
    remedy = "every rank makes the same calls, each with a device of its own";
  } else if (result == nccl::kUnhandledCudaError) {
    remedy = "see that this process has a device that works: nvidia-smi";
  }
  fail(ErrorKind::kBadState, what(), ": ", library_->text_of(result), "; ", remedy);
}

void NcclHandle::fail_late(const What& what, const char* remedy) const {
  fail(ErrorKind::kBadState, what(), ": not done by the deadline; ", remedy);
}

}  // namespace tradewind
