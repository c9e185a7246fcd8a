// The stand-in's communicator: a thread that does the queued jobs in order, as a device would, and
// an asynchronous error. A job that fails leaves the rest undone until an abort, as a kernel that
// waits for a lost peer would.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "nccl_standin_values.h"
#include "nccl_standin_wire.h"

namespace nccl_standin {

// One call. A group of calls is one job.
struct Operation {
  Header header;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  void* stream = nullptr;
  int peer = -1;  // of kPair
  bool is_send = false;
  long double scale = 1;
};
using Job = std::vector<Operation>;

// Operations of this process that a stream has not passed.
class Streams {
 public:
  void add(void* stream, int count) {
    const std::lock_guard lock(mutex_);
    num_queued_[stream] += count;
  }
  bool is_done(void* stream) {
    const std::lock_guard lock(mutex_);
    return num_queued_[stream] == 0;
  }

 private:
  std::mutex mutex_;
  std::map<void*, int> num_queued_;
};
inline Streams streams;
inline std::atomic<int> num_misuses{0};
inline thread_local std::string last_error;

inline nccl::Result misuse(const char* what, nccl::Result result) {
  ++num_misuses;
  last_error = what;
  return result;
}

}  // namespace nccl_standin

struct tradewind::nccl::Communicator {
  using Group = nccl_standin::Group;
  using Job = nccl_standin::Job;
  using Operation = nccl_standin::Operation;
  using Header = nccl_standin::Header;

  Communicator(Group* the_groups, int the_generation, int the_rank, int the_size, int the_device)
      : groups(the_groups),
        generation(the_generation),
        rank(the_rank),
        size(the_size),
        device(the_device),
        wire(the_groups + the_generation, the_rank, is_given_up) {}

  // --- the caller's side -------------------------------------------------------------------------

  void start(std::function<void(Result)> when_joined) {
    state = kInProgress;
    worker = std::thread([this, when_joined = std::move(when_joined)] {
      const Result result = arrive();
      settle(result);
      when_joined(result);
      if (result == kSuccess) work();
    });
  }

  Result queue(Job job) {
    for (Operation& operation : job) {
      nccl_standin::streams.add(operation.stream, 1);
      if (operation.header.kind != nccl_standin::kPair) operation.header.number = num_collectives++;
    }
    state = kInProgress;
    const std::lock_guard lock(mutex);
    jobs.push_back(std::move(job));
    wake.notify_one();
    return kInProgress;
  }

  // Ends the thread, and forgets what it has not done.
  void stop(bool at_once) {
    is_given_up = is_given_up || at_once;
    {
      const std::lock_guard lock(mutex);
      is_stopping = true;
      wake.notify_one();
    }
    if (worker.joinable()) worker.join();
    for (const Job& job : jobs) {
      for (const Operation& operation : job) nccl_standin::streams.add(operation.stream, -1);
    }
    jobs.clear();
  }

  Group* groups;
  int generation;
  int rank;
  int size;
  int device;
  std::atomic<Result> state{kSuccess};
  std::atomic<bool> is_given_up{false};
  std::atomic<bool> is_destroyed{false};
  std::vector<std::pair<DataType, long double>> scales;  // of made operations, from 5
  std::set<void*> registered;
  std::atomic<Communicator*> child{nullptr};
  std::string error;  // of the thread; read once `state` has it

 private:
  // --- the thread's side -------------------------------------------------------------------------

  void settle(Result result) {
    Result expected = kInProgress;
    if (result == kSuccess) {
      state.compare_exchange_strong(expected, kSuccess);
    } else {
      state = result;
    }
  }

  Result refuse(const char* what, Result result) {
    error = what;
    wire.fail(result);
    return result;
  }

  Result arrive() {
    Group& group = groups[generation];
    int none = 0;
    if (!group.num_ranks.compare_exchange_strong(none, size) && none != size) {
      return refuse("ranks disagree about the number of ranks", kInvalidArgument);
    }
    none = 0;
    if (!group.pids[rank].compare_exchange_strong(none, getpid())) {
      return refuse("two processes have one rank", kInvalidUsage);
    }
    group.devices[rank] = device;
    ++group.num_arrived;
    while (group.num_arrived < size) {
      if (is_given_up) return kInternalError;
      if (group.failure != 0) return static_cast<Result>(group.failure.load());
      usleep(200);
    }
    for (int other = 0; other < size; ++other) {
      if (other != rank && device >= 0 && group.devices[other] == device) {
        return refuse("Duplicate GPU detected: two ranks have one device", kInvalidUsage);
      }
    }
    return kSuccess;
  }

  void work() {
    for (;;) {
      std::unique_lock lock(mutex);
      wake.wait(lock, [this] { return !jobs.empty() || is_stopping; });
      if (jobs.empty() || is_given_up) return;
      const Job& job = jobs.front();
      lock.unlock();
      const bool is_final = job.front().header.kind == nccl_standin::kFinalize;
      if (!is_final) settle(kSuccess);  // launched
      if (const Result result = perform(job); result != kSuccess) {
        state = result;
        return;
      }
      lock.lock();
      const Job done = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      for (const Operation& operation : done) nccl_standin::streams.add(operation.stream, -1);
      if (is_final) settle(kSuccess);
    }
  }

  Result perform(const Job& job) {
    std::vector<nccl_standin::Outgoing> out;
    std::vector<nccl_standin::Incoming> in;
    for (const Operation& operation : job) {
      if (operation.header.kind != nccl_standin::kPair) {
        if (const Result result = perform_collective(operation); result != kSuccess) return result;
      } else if (operation.is_send) {
        out.push_back({operation.peer, operation.header, operation.input, bytes_of(operation)});
      } else {
        in.push_back({operation.peer, operation.header, operation.output, bytes_of(operation)});
      }
    }
    return wire.exchange(out, in, error);
  }

  static std::size_t bytes_of(const Operation& operation) {
    return operation.header.count *
           nccl_standin::bytes_of(static_cast<DataType>(operation.header.type));
  }

  // To every rank what it needs of this one, from every rank what this one needs.
  Result perform_collective(const Operation& call) {
    const std::size_t bytes = bytes_of(call);
    const Header& header = call.header;
    const bool reduces =
        header.kind == nccl_standin::kAllReduce || header.kind == nccl_standin::kReduceScatter;
    std::vector<std::vector<std::byte>> parts;
    std::vector<nccl_standin::Outgoing> out;
    std::vector<nccl_standin::Incoming> in;
    for (int peer = 0; peer < size; ++peer) {
      const std::size_t offset = static_cast<std::size_t>(peer) * bytes;
      const bool is_scatter = header.kind == nccl_standin::kReduceScatter;
      const bool is_gather = header.kind == nccl_standin::kAllGather;
      const bool is_root_only = header.kind == nccl_standin::kBroadcast;
      out.push_back({peer, header, call.input + (is_scatter ? offset : 0),
                     is_root_only && header.root != rank ? 0 : bytes});
      parts.emplace_back(reduces ? bytes : 0);
      in.push_back({peer, header,
                    reduces ? parts.back().data() : call.output + (is_gather ? offset : 0),
                    is_root_only && header.root != peer ? 0 : bytes});
    }
    const Result result = wire.exchange(out, in, error);
    if (result == kSuccess && reduces) {
      nccl_standin::reduce(parts, static_cast<DataType>(header.type), header.op, call.scale,
                           call.output);
    }
    return result;
  }

  nccl_standin::Wire wire;
  std::uint64_t num_collectives = 0;
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Job> jobs;
  bool is_stopping = false;
  std::thread worker;
};
