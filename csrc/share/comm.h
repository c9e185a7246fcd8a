// One rank's end of a group of ranks, and the collectives that share gradients and parameters: the
// base class checks a call and describes it, a back-end queues it. Calls go out in the same order
// on every rank. Memory belongs to the caller and stays valid until its stream has passed the call.
// One thread at a time, except check() and abort(), which any thread may call.
#pragma once

#include <cstdint>
#include <string>

#include "arena/dtype.h"
#include "share/deadline.h"

namespace tradewind {

enum class Reduction : std::uint8_t {
  kSum,
  kMax,
  // Each rank's values times 1/N, then summed: no sum grows N times too large for its dtype. A
  // 16-bit dtype rounds 1/N too, exactly only for a power of two; else sum, and scale later.
  kMean,
};

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
};

// One collective as a back-end gets it: checked.
struct CommCall {
  Collective collective = Collective::kAllReduce;
  const void* input = nullptr;
  void* output = nullptr;
  std::int64_t num_elements = 0;  // of one rank's part where the collective has parts
  DType dtype = DType::kFloat32;
  Reduction reduction = Reduction::kSum;  // of the two that reduce
  int root = 0;                           // of kBroadcast
  void* stream = nullptr;
};

// What a back-end keeps of memory that it was told about.
struct MemoryToken {
  void* handle = nullptr;
};

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  // Queued on `stream`, which is null on host memory: there a call has finished when it returns.
  // Reductions take floating dtypes, and sum and max also the integers that the back-end adds;
  // kMax takes no complex dtype, kMean only floating and complex ones.
  // Throws Error(kBadValue) or Error(kBadType) before anything is queued, Error(kBadState) when the
  // back-end refuses, Error(kPeerLost) from one that knows that a rank is gone or late; each names
  // the operation, its bytes and what to do.

  // In place where output == input.
  void all_reduce(const void* input, void* output, std::int64_t num_elements, DType dtype,
                  Reduction reduction, void* stream);
  // input: size() parts; output: this rank's, which may be input's own part rank().
  void reduce_scatter(const void* input, void* output, std::int64_t part_elements, DType dtype,
                      Reduction reduction, void* stream);
  // output: size() parts in rank order; input may be output's own part rank().
  void all_gather(const void* input, void* output, std::int64_t part_elements, DType dtype,
                  void* stream);
  // input: a part for every rank; output: one from every rank. They must not overlap.
  void all_to_all(const void* input, void* output, std::int64_t part_elements, DType dtype,
                  void* stream);
  // From root's `data` into everyone else's.
  void broadcast(void* data, std::int64_t num_elements, DType dtype, int root, void* stream);

  // Until every rank has passed what it queued on `stream` before. Throws Error(kBadState) naming
  // the rank at the deadline, and earlier where the group has failed.
  virtual void barrier(void* stream, Deadline deadline) = 0;
  // Until `stream` has passed all that was queued on it; likewise.
  virtual void wait(void* stream, Deadline deadline) = 0;

  // Calls between the two go out together and may run side by side; the same group on every rank,
  // begun and ended on one thread. Use CommGroup, which ends a group that an error has left.
  virtual void group_begin() = 0;
  virtual void group_end() = 0;

  // Memory that will be sent from or into many times, so that it need not be copied: a hint. The
  // memory stays valid until deregistered. Not within a group.
  virtual MemoryToken register_memory(void* data, std::int64_t num_bytes) = 0;
  virtual void deregister_memory(MemoryToken token) = 0;

  // Throws Error(kBadState) or Error(kPeerLost) where the group has failed or was aborted. Never
  // waits.
  virtual void check() = 0;
  // Gives up what is queued, here alone; nothing but the destructor may follow. Returns in time or
  // throws Error(kBadState).
  virtual void abort(Deadline deadline) = 0;

 protected:
  // Throws Error(kBadValue) unless 0 <= rank < size.
  Comm(int rank, int size);
  // The call is checked and has elements.
  virtual void queue(const CommCall& call) = 0;

 private:
  void queue_checked(const CommCall& call);

  int rank_;
  int size_;
};

// What a call moves through this rank's memory: all parts, where it has parts.
std::int64_t bytes_of(const CommCall& call, int size);
// "all_reduce of 1000 float32 (4000 bytes) on rank 1 of 4"
std::string text_of(const CommCall& call, int rank, int size);

// Begins a group and ends it: by end(), whose errors count, or by its destructor on the way out of
// a failure.
class CommGroup {
 public:
  explicit CommGroup(Comm& comm);
  ~CommGroup() noexcept;
  CommGroup(const CommGroup&) = delete;
  CommGroup& operator=(const CommGroup&) = delete;
  void end();

 private:
  Comm* comm_;
};

}  // namespace tradewind
