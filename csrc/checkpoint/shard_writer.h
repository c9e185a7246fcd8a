// Writes one shard file at a time from memory as it lies there, with a pool of threads: block by
// block, checksummed on the way, around the page cache where the file system takes that, and synced
// at the end. What a closed gate holds back is let go block by block as it has been handed over.
// Threads start with the first save and stay until close(); they need no Python. Any thread may
// call. A forked child has no such threads: there start() throws and the rest does nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arena/gate.h"
#include "base/env.h"
#include "checkpoint/shard_layout.h"

namespace tradewind {

struct ShardResult {
  std::int64_t size_bytes = 0;
  std::uint32_t crc32c = 0;  // of the whole file
  std::vector<std::uint32_t> block_crc32c;
};

// A save under way. It may be let go at any time: the writer goes on.
class ShardWrite {
 public:
  class Job;
  explicit ShardWrite(std::shared_ptr<Job> job);
  ~ShardWrite() noexcept;
  ShardWrite(const ShardWrite&) = delete;
  ShardWrite& operator=(const ShardWrite&) = delete;

  // Whether it is over, well or not, at the deadline at the latest: from then on nothing reads the
  // caller's memory. Throws Error(kBadState) in a forked child.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;
  // Of a save that is over; the file is on stable storage, its name is not (sync the directory).
  // Throws what ended it: Error(kSystem) with errno and path (ECANCELED after cancel()), or
  // Error(kBadState) where it is not over.
  [[nodiscard]] ShardResult result() const;
  // Ends it early, without waiting: the gate opens, and it is over as soon as calls under way have
  // returned. The file stays, and is worth nothing.
  void cancel() noexcept;

 private:
  std::shared_ptr<Job> job_;
};

class ShardWriter {
 public:
  struct Request {
    std::shared_ptr<Env> env;
    std::string path;
    std::string header;
    // Their memory stays valid, and unchanged but for what `closing` lets go, until it is over.
    std::vector<ShardRegion> regions;
    std::int64_t block_bytes = std::int64_t{4} << 20;
    // The file is there, under this name alone, and is overwritten in place; else it is made.
    bool recycles = false;
    // Opened whole once everything is written, and where anything fails. May be null.
    std::shared_ptr<GateClosing> closing;
  };

  explicit ShardWriter(int num_threads = 16);
  // As close().
  ~ShardWriter() noexcept;
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Returns at once: the file is opened, and space for it taken, by the pool. Throws
  // Error(kBadValue) as ShardLayout does, and Error(kBadState) while another save is under way,
  // after close() and in a forked child.
  [[nodiscard]] std::unique_ptr<ShardWrite> start(Request request);
  // Cancels what is under way and ends the threads, once calls under way have returned. Idempotent.
  void close() noexcept;

 private:
  struct Pool;
  std::unique_ptr<Pool> pool_;
};

}  // namespace tradewind
