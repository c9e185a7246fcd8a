// Stands in for libnccl: the same C interface, on host memory, between processes. It refuses what
// NCCL would not forgive: calls that differ between ranks, use after an end, a call before the last
// one's answer, a group that is not balanced, two ranks on one device (NCCL_STANDIN_DEVICE). The
// answer is NCCL's, or a count of misuses, never a hang. Faults come by the entries nccl_standin_*.
// Variants: NCCL_STANDIN_OLD, _ANCIENT and _BROKEN lack what older or broken libraries lack.
#include <cstdlib>
#include <memory>
#include <utility>

#include "nccl_standin_comm.h"

using namespace tradewind::nccl;
using nccl_standin::misuse;
using nccl_standin::Operation;

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// Ended ones stay, so that their use is found rather than undefined.
std::mutex comms_mutex;
std::vector<std::unique_ptr<Communicator>>& comms() {
  static auto* all = new std::vector<std::unique_ptr<Communicator>>;
  return *all;
}

std::atomic<int> abort_milliseconds{0};

thread_local int group_depth = 0;
thread_local Result group_error = kSuccess;
thread_local std::map<CommHandle, nccl_standin::Job> group_jobs;

CommHandle adopt(std::unique_ptr<Communicator> comm) {
  const std::lock_guard lock(comms_mutex);
  comms().push_back(std::move(comm));
  return comms().back().get();
}

Result check_known(CommHandle comm) {
  const std::lock_guard lock(comms_mutex);
  for (const auto& known : comms()) {
    if (known.get() != comm) continue;
    return comm->is_destroyed ? misuse("used after its end", kInvalidArgument) : kSuccess;
  }
  return misuse("not a communicator", kInvalidArgument);
}

Result check_ready(CommHandle comm) {
  if (const Result result = check_known(comm); result != kSuccess) return result;
  const Result state = comm->state;
  return state == kInProgress ? misuse("used before the last call's answer", kInvalidArgument)
                              : state;
}

Result in_group(Result result) {
  if (group_depth > 0 && group_error == kSuccess) group_error = result;
  return result;
}

Result add(CommHandle comm, Operation operation) {
  if (const Result result = check_ready(comm); result != kSuccess) return in_group(result);
  const int op = operation.header.op;
  const auto type = static_cast<DataType>(operation.header.type);
  if (op >= 5) {
    const auto made = static_cast<std::size_t>(op - 5);
    if (made >= comm->scales.size() || comm->scales[made].first != type) {
      return in_group(misuse("not an operation of this type", kInvalidArgument));
    }
    operation.scale = comm->scales[made].second;
    operation.header.op = 5;
  }
  if (operation.input == nullptr && operation.output == nullptr) {
    return in_group(misuse("no memory", kInvalidArgument));
  }
  if (group_depth > 0) {
    group_jobs[comm].push_back(operation);
    return kSuccess;
  }
  return comm->queue({operation});
}

Operation collective(std::int32_t kind, const void* input, void* output, std::size_t count,
                     DataType type, int op, int root, void* stream) {
  Operation operation;
  operation.header = {kind, type, count, op, root, 0};
  operation.input = static_cast<const std::byte*>(input);
  operation.output = static_cast<std::byte*>(output);
  operation.stream = stream;
  return operation;
}

Result add_pair(CommHandle comm, const void* input, void* output, std::size_t count, DataType type,
                int peer, void* stream) {
  Operation operation = collective(nccl_standin::kPair, input, output, count, type, 0, 0, stream);
  operation.peer = peer;
  operation.is_send = input != nullptr;
  return add(comm, operation);
}

Result end(CommHandle comm, bool at_once) {
  if (group_depth > 0) return misuse("ended within a group", kInvalidUsage);
  if (comm->is_destroyed.exchange(true)) return misuse("ended twice", kInvalidArgument);
  if (Communicator* child = comm->child; at_once && child != nullptr && child->state != kSuccess) {
    child->stop(true);
  }
  comm->stop(at_once);
  return kSuccess;
}

}  // namespace

EXPORTED Result ncclGetVersion(int* version) {
#if defined(NCCL_STANDIN_OLD)
  *version = 21805;
#elif defined(NCCL_STANDIN_ANCIENT)
  *version = 2804;
#else
  *version = 22809;
#endif
  return kSuccess;
}

EXPORTED const char* ncclGetErrorString(Result result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "in progress"};
  return kTexts[result];
}

EXPORTED const char* ncclGetLastError(CommHandle) { return nccl_standin::last_error.c_str(); }

EXPORTED Result ncclGetUniqueId(UniqueId* id) {
  *id = nccl_standin::make_id();
  return kSuccess;
}

EXPORTED Result ncclCommInitRankConfig(CommHandle* made, int num_ranks, UniqueId id, int rank,
                                       Config* config) {
  *made = nullptr;
  if (config == nullptr || config->magic != 0xcafebeef || config->blocking != 0) {
    return misuse("a configuration that this stand-in does not have", kInvalidArgument);
  }
  if (num_ranks > nccl_standin::kMostRanks) return misuse("too many ranks", kInvalidArgument);
  nccl_standin::Group* groups = nccl_standin::open_group(id);
  if (groups == nullptr) return kSystemError;
  const char* device = std::getenv("NCCL_STANDIN_DEVICE");
  *made = adopt(std::make_unique<Communicator>(groups, 0, rank, num_ranks,
                                               device == nullptr ? -1 : std::atoi(device)));
  (*made)->start([](Result) {});
  return kInProgress;
}

EXPORTED Result ncclCommGetAsyncError(CommHandle comm, Result* error) {
  if (const Result result = check_known(comm); result != kSuccess) return result;
  *error = comm->state;
  if (*error != kSuccess && *error != kInProgress) nccl_standin::last_error = comm->error;
  return kSuccess;
}

EXPORTED Result ncclCommFinalize(CommHandle comm) {
  if (const Result result = check_ready(comm); result != kSuccess) return result;
  return comm->queue({collective(nccl_standin::kFinalize, nullptr, nullptr, 0, kInt8, 0, 0, comm)});
}

EXPORTED Result ncclCommDestroy(CommHandle comm) {
  if (const Result result = check_ready(comm); result != kSuccess) return result;
  return end(comm, false);
}

EXPORTED Result ncclCommAbort(CommHandle comm) {
  if (const Result result = check_known(comm); result != kSuccess) return result;
  usleep(static_cast<useconds_t>(abort_milliseconds) * 1000);
  return end(comm, true);
}

EXPORTED Result ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}

EXPORTED Result ncclGroupEnd() {
  if (group_depth == 0) return misuse("not in a group", kInvalidUsage);
  if (--group_depth > 0) return kSuccess;
  const auto jobs = std::exchange(group_jobs, {});
  Result result = std::exchange(group_error, kSuccess);
  for (const auto& [comm, job] : jobs) {
    if (result == kSuccess || result == kInProgress) result = comm->queue(job);
  }
  return result;
}

#ifndef NCCL_STANDIN_BROKEN
EXPORTED Result ncclAllReduce(const void* input, void* output, std::size_t count, DataType type,
                              RedOp op, CommHandle comm, void* stream) {
  return add(comm, collective(nccl_standin::kAllReduce, input, output, count, type, op, 0, stream));
}
#endif

EXPORTED Result ncclReduceScatter(const void* input, void* output, std::size_t part_count,
                                  DataType type, RedOp op, CommHandle comm, void* stream) {
  return add(comm, collective(nccl_standin::kReduceScatter, input, output, part_count, type, op, 0,
                              stream));
}

EXPORTED Result ncclAllGather(const void* input, void* output, std::size_t part_count,
                              DataType type, CommHandle comm, void* stream) {
  return add(comm,
             collective(nccl_standin::kAllGather, input, output, part_count, type, 0, 0, stream));
}

EXPORTED Result ncclBroadcast(const void* input, void* output, std::size_t count, DataType type,
                              int root, CommHandle comm, void* stream) {
  return add(comm,
             collective(nccl_standin::kBroadcast, input, output, count, type, 0, root, stream));
}

EXPORTED Result ncclSend(const void* input, std::size_t count, DataType type, int peer,
                         CommHandle comm, void* stream) {
  return add_pair(comm, input, nullptr, count, type, peer, stream);
}

EXPORTED Result ncclRecv(void* output, std::size_t count, DataType type, int peer, CommHandle comm,
                         void* stream) {
  return add_pair(comm, nullptr, output, count, type, peer, stream);
}

#if !defined(NCCL_STANDIN_OLD) && !defined(NCCL_STANDIN_ANCIENT)
EXPORTED Result ncclRedOpCreatePreMulSum(RedOp* op, void* scalar, DataType type,
                                         ScalarResidence residence, CommHandle comm) {
  if (const Result result = check_ready(comm); result != kSuccess) return result;
  if (residence != kScalarHostImmediate) return misuse("no device memory", kInvalidArgument);
  comm->scales.emplace_back(type, nccl_standin::load(type, static_cast<std::byte*>(scalar)));
  *op = static_cast<RedOp>(4 + comm->scales.size());
  return kSuccess;
}

EXPORTED Result ncclRedOpDestroy(RedOp, CommHandle comm) { return check_ready(comm); }

EXPORTED Result ncclMemAlloc(void** data, std::size_t num_bytes) {
  *data = std::malloc(num_bytes);
  return *data == nullptr ? kUnhandledCudaError : kSuccess;
}

EXPORTED Result ncclMemFree(void* data) {
  std::free(data);
  return kSuccess;
}

EXPORTED Result ncclCommRegister(CommHandle comm, void* data, std::size_t, void** handle) {
  if (const Result result = check_ready(comm); result != kSuccess) return result;
  comm->registered.insert(data);
  *handle = data;
  return kSuccess;
}

EXPORTED Result ncclCommDeregister(CommHandle comm, void* handle) {
  if (const Result result = check_ready(comm); result != kSuccess) return result;
  return comm->registered.erase(handle) == 1 ? kSuccess
                                             : misuse("was not registered", kInvalidArgument);
}

EXPORTED Result ncclCommShrink(CommHandle comm, int* excluded, int num_excluded, CommHandle* made,
                               Config*, int flags) {
  if (const Result result = check_known(comm); result != kSuccess) return result;
  if (flags != kShrinkAbort) return misuse("only after giving up", kInvalidArgument);
  *made = nullptr;
  comm->stop(true);
  comm->state = kInProgress;
  int rank = comm->rank;
  for (int i = 0; i < num_excluded; ++i) rank -= excluded[i] < comm->rank ? 1 : 0;
  CommHandle child = adopt(std::make_unique<Communicator>(comm->groups, comm->generation + 1, rank,
                                                          comm->size - num_excluded, comm->device));
  comm->child = child;
  child->start([comm, child, made](Result result) {
    if (result == kSuccess) std::atomic_ref<CommHandle>(*made).store(child);
    comm->state = result;
  });
  return kInProgress;
}
#endif

// --- control -------------------------------------------------------------------------------------

EXPORTED int nccl_standin_stream_is_done(void* stream) {
  return nccl_standin::streams.is_done(stream) ? 1 : 0;
}

// Calls of this process that NCCL would not forgive.
EXPORTED int nccl_standin_num_misuses() { return nccl_standin::num_misuses; }

// This process dies when it has sent that many chunks of 4 KiB more.
EXPORTED void nccl_standin_die_after_chunks(int num_chunks) {
  nccl_standin::Wire::num_chunks_to_live = num_chunks;
}

// Every group of this process finds this error.
EXPORTED void nccl_standin_set_async_error(int error) {
  const std::lock_guard lock(comms_mutex);
  for (const auto& comm : comms()) comm->state = static_cast<Result>(error);
}

// Aborts take that long.
EXPORTED void nccl_standin_delay_aborts(int milliseconds) { abort_milliseconds = milliseconds; }
