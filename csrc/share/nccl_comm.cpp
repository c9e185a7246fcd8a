#include "share/nccl_comm.h"

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "share/nccl_types.h"

namespace tradewind {
namespace {

constexpr const char* kWithoutTheDead =
    "a rank may be gone or behind: abort, and go on with those that are left";

std::string text_of_member(int rank, int size) {
  std::ostringstream text;
  text << "rank " << rank << " of " << size;
  return text.str();
}

std::size_t count_of(const CommCall& call) {
  return static_cast<std::size_t>(call.num_elements) *
         static_cast<std::size_t>(nccl_type_of(call.dtype).num_values);
}

}  // namespace

nccl::UniqueId NcclComm::make_id(const NcclLibrary& library) {
  nccl::UniqueId id{};
  if (const nccl::Result result = library.get_unique_id(&id); result != nccl::kSuccess) {
    fail(ErrorKind::kBadState, "an id for a group: ", library.text_of(result),
         "; see that this host has a network interface (NCCL_SOCKET_IFNAME)");
  }
  return id;
}

NcclComm::NcclComm(std::shared_ptr<const NcclLibrary> library, int rank, int size,
                   NcclOptions options)
    : Comm(rank, size),
      library_(std::move(library)),
      options_(std::move(options)),
      handle_(library_, text_of_member(rank, size)) {}

NcclComm::NcclComm(std::shared_ptr<const NcclLibrary> library, const nccl::UniqueId& id, int rank,
                   int size, NcclOptions options, Deadline deadline)
    : NcclComm(std::move(library), rank, size, std::move(options)) {
  handle_.join(id, rank, size, deadline);
}

std::unique_ptr<NcclComm> NcclComm::shrink(std::vector<int> excluded, Deadline deadline) {
  std::sort(excluded.begin(), excluded.end());
  const bool is_list = !excluded.empty() && excluded.front() >= 0 && excluded.back() < size() &&
                       std::adjacent_find(excluded.begin(), excluded.end()) == excluded.end() &&
                       !std::binary_search(excluded.begin(), excluded.end(), rank());
  if (!is_list) {
    std::ostringstream got;
    for (const int rank : excluded) got << " " << rank;
    fail(ErrorKind::kBadValue, "shrinking on ", member(),
         ": expected the other ranks to leave out, each once, got", got.str(),
         excluded.empty() ? " none" : "", "; every survivor passes the same list");
  }
  const auto num_before = std::lower_bound(excluded.begin(), excluded.end(), rank());
  std::unique_ptr<NcclComm> made(
      new NcclComm(library_, rank() - static_cast<int>(num_before - excluded.begin()),
                   size() - static_cast<int>(excluded.size()), options_));
  try {
    made->handle_.shrink_from(handle_, std::move(excluded), deadline);
  } catch (const Error&) {
    handle_.abort_quietly(deadline);
    throw;
  }
  handle_.abort_quietly(deadline);
  return made;
}

void NcclComm::close(Deadline deadline) { handle_.close(deadline); }

void NcclComm::abort(Deadline deadline) { handle_.abort(deadline); }

void NcclComm::check() {
  handle_.check([this] { return text_of_last(); });
}

void NcclComm::run(const NcclHandle::What& what, const NcclHandle::Call& call) {
  if (group_depth_ > 0) {
    handle_.run_in_group(what, call);
  } else {
    handle_.run(what, std::chrono::steady_clock::now() + options_.call_timeout, call);
  }
}

void NcclComm::queue(const CommCall& call) {
  const NcclHandle::What what = [&] { return text_of(call, rank(), size()); };
  const bool reduces =
      call.collective == Collective::kAllReduce || call.collective == Collective::kReduceScatter;
  if (reduces && !nccl_type_of(call.dtype).can_reduce) {
    fail(ErrorKind::kBadType, what(), ": expected a dtype that NCCL adds, got ",
         dtype_name(call.dtype), "; convert it to int32");
  }
  run(what, [&](nccl::CommHandle comm) { return issue(call, comm); });
  const std::lock_guard lock(last_mutex_);
  last_ = call;
}

nccl::Result NcclComm::issue(const CommCall& call, nccl::CommHandle comm) {
  const nccl::DataType type = nccl_type_of(call.dtype).type;
  const std::size_t count = count_of(call);
  switch (call.collective) {
    case Collective::kAllReduce:
      return library_->all_reduce(call.input, call.output, count, type, op_of(call, comm), comm,
                                  call.stream);
    case Collective::kReduceScatter:
      return library_->reduce_scatter(call.input, call.output, count, type, op_of(call, comm), comm,
                                      call.stream);
    case Collective::kAllGather:
      return library_->all_gather(call.input, call.output, count, type, comm, call.stream);
    case Collective::kBroadcast:
      return library_->broadcast(call.input, call.output, count, type, call.root, comm,
                                 call.stream);
    case Collective::kAllToAll: return issue_all_to_all(call, comm);
  }
  return nccl::kInternalError;
}

nccl::Result NcclComm::issue_all_to_all(const CommCall& call, nccl::CommHandle comm) const {
  const nccl::DataType type = nccl_type_of(call.dtype).type;
  const std::size_t count = count_of(call);
  const auto part_bytes = static_cast<std::size_t>(call.num_elements * element_bytes(call.dtype));
  const auto* input = static_cast<const std::byte*>(call.input);
  auto* output = static_cast<std::byte*>(call.output);
  nccl::Result result = library_->group_start();
  if (result != nccl::kSuccess) return result;
  // SAFETY: both hold size() parts, by Comm::all_to_all's contract.
  for (int peer = 0; peer < size() && result == nccl::kSuccess; ++peer) {
    const std::size_t offset = static_cast<std::size_t>(peer) * part_bytes;
    result = library_->send(input + offset, count, type, peer, comm, call.stream);
    if (result != nccl::kSuccess) break;
    result = library_->recv(output + offset, count, type, peer, comm, call.stream);
  }
  const nccl::Result ended = library_->group_end();
  return result == nccl::kSuccess ? ended : result;
}

nccl::RedOp NcclComm::op_of(const CommCall& call, nccl::CommHandle comm) {
  if (call.reduction == Reduction::kSum) return nccl::kSum;
  if (call.reduction == Reduction::kMax) return nccl::kMax;
  const nccl::DataType type = nccl_type_of(call.dtype).type;
  const bool is_too_small = type == nccl::kFloat16 && size() > kMostFloat16Ranks;
  if (!library_->has_pre_mul_sum() || is_too_small) return nccl::kAvg;
  std::optional<nccl::RedOp>& op = mean_ops_[static_cast<std::size_t>(call.dtype)];
  if (!op) {
    NcclScalar scalar = nccl_reciprocal(size(), type);
    nccl::RedOp made = nccl::kAvg;
    const nccl::Result result =
        library_->red_op_create(&made, &scalar, type, nccl::kScalarHostImmediate, comm);
    if (result != nccl::kSuccess) {
      fail(ErrorKind::kBadState, text_of(call, rank(), size()), ": a sum of values times 1/",
           size(), ": ", library_->text_of(result), "; abort and make a new group");
    }
    op = made;
  }
  return *op;
}

void NcclComm::group_begin() {
  handle_.run_in_group([this] { return "beginning a group of calls on " + member(); },
                       [this](nccl::CommHandle) { return library_->group_start(); });
  ++group_depth_;
}

void NcclComm::group_end() {
  if (group_depth_ == 0) {
    fail(ErrorKind::kBadState, "ending a group of calls on ", member(),
         ": expected one that was begun, found none; use CommGroup");
  }
  --group_depth_;
  run([this] { return "a group of calls, the last being " + text_of_last(); },
      [this](nccl::CommHandle) { return library_->group_end(); });
}

void NcclComm::barrier(void* stream, Deadline deadline) {
  const NcclHandle::What what = [this] { return "a barrier on " + member(); };
  require_no_group(what);
  if (barrier_memory_ == nullptr) {
    barrier_memory_ = std::make_unique<NcclMemory>(library_, 4);
  }
  handle_.run(what, deadline, [&](nccl::CommHandle comm) {
    void* word = barrier_memory_->data();
    return library_->all_reduce(word, word, 1, nccl::kUint32, nccl::kMax, comm, stream);
  });
  wait_for(stream, deadline, what);
}

void NcclComm::require_no_group(const NcclHandle::What& what) const {
  if (group_depth_ > 0) {
    fail(ErrorKind::kBadState, what(), ": expected no open group of calls, found ", group_depth_,
         "; end it first: its calls have not gone out");
  }
}

void NcclComm::wait(void* stream, Deadline deadline) {
  wait_for(stream, deadline, [this] { return text_of_last(); });
}

void NcclComm::wait_for(void* stream, Deadline deadline, const NcclHandle::What& what) {
  require_no_group(what);
  if (!options_.is_stream_done) {
    fail(ErrorKind::kBadState, "waiting for ", what(),
         ": expected NcclOptions::is_stream_done, got none; pass one that asks the stream");
  }
  const bool is_done = poll_until(deadline, [&] {
    const bool is_passed = options_.is_stream_done(stream);
    handle_.check(what);  // afterwards: a stream also passes work that an error cut short
    return is_passed;
  });
  if (!is_done) {
    fail(ErrorKind::kBadState, what(), ": its stream has not passed it by the deadline; ",
         kWithoutTheDead);
  }
}

MemoryToken NcclComm::register_memory(void* data, std::int64_t num_bytes) {
  const NcclHandle::What what = [&] {
    return "registering " + std::to_string(num_bytes) + " bytes of memory on " + member();
  };
  library_->require(library_->has_registration(), "registered memory", "2.19");
  require_no_group(what);
  MemoryToken token;
  run(what, [&](nccl::CommHandle comm) {
    return library_->comm_register(comm, data, static_cast<std::size_t>(num_bytes), &token.handle);
  });
  return token;
}

void NcclComm::deregister_memory(MemoryToken token) {
  const NcclHandle::What what = [&] { return "deregistering memory on " + member(); };
  library_->require(library_->has_registration(), "registered memory", "2.19");
  require_no_group(what);
  run(what, [&](nccl::CommHandle comm) { return library_->comm_deregister(comm, token.handle); });
}

std::string NcclComm::member() const { return text_of_member(rank(), size()); }

std::string NcclComm::text_of_last() {
  const std::lock_guard lock(last_mutex_);
  return last_ ? text_of(*last_, rank(), size()) : member() + " before its first call";
}

}  // namespace tradewind
