// What connects the stand-in's processes: a memfd that every rank opens by the id's path, with a
// channel of one chunk from each rank to each. Messages say what they are, so the receiver sees a
// call that does not match its own. Nothing here waits for a process that is dead.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "share/nccl_api.h"

namespace nccl_standin {

using namespace tradewind;

constexpr int kMostRanks = 4;
constexpr int kNumGenerations = 3;  // a group, what it shrinks to, and so on
constexpr std::size_t kChunkBytes = 4096;

enum Kind : std::int32_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kPair, kFinalize };

// Equal at both ends of a message.
struct Header {
  std::int32_t kind;
  std::int32_t type;
  std::uint64_t count;
  std::int32_t op;
  std::int32_t root;
  std::uint64_t number;  // of the collective

  bool operator==(const Header&) const = default;
};

inline std::string text_of(const Header& header) {
  constexpr const char* kNames[] = {"AllReduce", "ReduceScatter", "AllGather",
                                    "Broadcast", "Send/Recv",     "Finalize"};
  return std::string(kNames[header.kind]) + " number " + std::to_string(header.number) + " of " +
         std::to_string(header.count) + " of type " + std::to_string(header.type) + ", operation " +
         std::to_string(header.op) + ", root " + std::to_string(header.root);
}

struct Channel {
  std::atomic<std::uint64_t> num_written;
  std::atomic<std::uint64_t> num_read;
  Header header;
  std::size_t chunk_bytes;
  std::byte chunk[kChunkBytes];
};

struct Group {
  std::atomic<int> num_ranks;
  std::atomic<int> num_arrived;
  std::atomic<int> failure;  // a Result that all ranks see
  std::atomic<int> pids[kMostRanks];
  std::atomic<int> devices[kMostRanks];
  Channel channels[kMostRanks][kMostRanks];  // [from][to]
};

inline nccl::UniqueId make_id() {
  const int file = memfd_create("nccl_standin", 0);
  nccl::UniqueId id{};
  if (ftruncate(file, sizeof(Group) * kNumGenerations) == 0) {
    std::snprintf(id.internal, sizeof(id.internal), "/proc/%d/fd/%d", getpid(), file);
  }
  return id;
}

// Null where the id's maker is gone.
inline Group* open_group(const nccl::UniqueId& id) {
  const int file = open(id.internal, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* memory =
      mmap(nullptr, sizeof(Group) * kNumGenerations, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<Group*>(memory);
}

inline bool is_dead(int pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return true;
  char line[256] = {};
  const bool is_read = std::fgets(line, sizeof(line), file) != nullptr;
  std::fclose(file);
  const char* after_name = is_read ? std::strrchr(line, ')') : nullptr;
  return after_name == nullptr || after_name[2] == 'Z' || after_name[2] == 'X';
}

struct Outgoing {
  int peer;
  Header header;
  const std::byte* data;
  std::size_t num_bytes;
  std::size_t num_sent = 0;
  bool is_done = false;
};

struct Incoming {
  int peer;
  Header header;
  std::byte* data;
  std::size_t num_bytes;
  std::size_t num_received = 0;
  bool is_done = false;
};

// One rank's end of a group.
class Wire {
 public:
  Wire(Group* group, int rank, const std::atomic<bool>& is_given_up)
      : group_(group), rank_(rank), is_given_up_(is_given_up) {}

  // Of this process, by control: chunks until it dies in the middle of its work; -1: it does not.
  static inline std::atomic<int> num_chunks_to_live{-1};

  // Moves all of them, side by side; those with one peer in order.
  nccl::Result exchange(std::vector<Outgoing>& out, std::vector<Incoming>& in, std::string& error) {
    for (int num_idle = 0;;) {
      if (is_given_up_) return nccl::kInternalError;
      const bool has_moved = push_all(out) | pull_all(in, error);
      if (all_done(out) && all_done(in)) return nccl::kSuccess;
      if (const int failure = group_->failure; failure != 0) {
        return static_cast<nccl::Result>(failure);
      }
      if (has_moved) {
        num_idle = 0;
      } else if (++num_idle % 16 == 0) {
        if (waits_for_the_dead(out) || waits_for_the_dead(in)) {
          if (!pull_all(in, error)) fail(nccl::kRemoteError);
        }
        usleep(200);
      } else {
        std::this_thread::yield();
      }
    }
  }

  void fail(nccl::Result result) {
    int none = 0;
    group_->failure.compare_exchange_strong(none, result);
  }

 private:
  template <class Transfers>
  static bool all_done(const Transfers& transfers) {
    for (const auto& transfer : transfers) {
      if (!transfer.is_done) return false;
    }
    return true;
  }

  template <class Transfers>
  bool waits_for_the_dead(const Transfers& transfers) const {
    for (const auto& transfer : transfers) {
      if (!transfer.is_done && is_dead(group_->pids[transfer.peer])) return true;
    }
    return false;
  }

  bool push_all(std::vector<Outgoing>& out) {
    bool has_moved = false;
    bool is_busy[kMostRanks] = {};
    for (Outgoing& transfer : out) {
      if (transfer.is_done || is_busy[transfer.peer]) continue;
      is_busy[transfer.peer] = true;
      Channel& channel = group_->channels[rank_][transfer.peer];
      if (channel.num_written.load() != channel.num_read.load()) continue;
      const std::size_t left = transfer.num_bytes - transfer.num_sent;
      channel.header = transfer.header;
      channel.chunk_bytes = left < kChunkBytes ? left : kChunkBytes;
      if (channel.chunk_bytes > 0) {
        std::memcpy(channel.chunk, transfer.data + transfer.num_sent, channel.chunk_bytes);
      }
      transfer.num_sent += channel.chunk_bytes;
      transfer.is_done = transfer.num_sent == transfer.num_bytes;
      channel.num_written.fetch_add(1);
      has_moved = true;
      if (num_chunks_to_live >= 0 && num_chunks_to_live-- == 0) _exit(3);
    }
    return has_moved;
  }

  bool pull_all(std::vector<Incoming>& in, std::string& error) {
    bool has_moved = false;
    bool is_busy[kMostRanks] = {};
    for (Incoming& transfer : in) {
      if (transfer.is_done || is_busy[transfer.peer]) continue;
      is_busy[transfer.peer] = true;
      Channel& channel = group_->channels[transfer.peer][rank_];
      if (channel.num_written.load() == channel.num_read.load()) continue;
      if (channel.header != transfer.header ||
          channel.chunk_bytes > transfer.num_bytes - transfer.num_received) {
        error = "rank " + std::to_string(rank_) + " calls " + text_of(transfer.header) + "; rank " +
                std::to_string(transfer.peer) + " calls " + text_of(channel.header);
        fail(nccl::kInvalidUsage);
        return true;
      }
      if (channel.chunk_bytes > 0) {
        std::memcpy(transfer.data + transfer.num_received, channel.chunk, channel.chunk_bytes);
      }
      transfer.num_received += channel.chunk_bytes;
      transfer.is_done = transfer.num_received == transfer.num_bytes;
      channel.num_read.fetch_add(1);
      has_moved = true;
    }
    return has_moved;
  }

  Group* group_;
  int rank_;
  const std::atomic<bool>& is_given_up_;
};

}  // namespace nccl_standin
