// Reads parts of a shard file into memory where it is wanted, with threads of its own, and believes
// nothing that its blocks' checksums do not confirm. Around the page cache where the file system
// takes that; whole pages go straight to where they are wanted. The file is locked (shared) while
// it is read, so that nobody recycles it. Any thread may call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/env.h"

namespace tradewind {

// What the file holds at [file_offset, file_offset + size_bytes) is wanted at `data`.
struct ShardTarget {
  std::int64_t file_offset = 0;
  std::int64_t size_bytes = 0;
  void* data = nullptr;
};

struct ShardRequest {
  std::string path;
  // As ShardResult had them.
  std::int64_t size_bytes = 0;
  std::int64_t block_bytes = std::int64_t{4} << 20;
  std::vector<std::uint32_t> block_crc32c;
  // In any order. Some may want the same part of the file; their memory must not overlap.
  std::vector<ShardTarget> targets;
  int num_threads = 8;
  bool verifies_all = false;  // else the blocks that targets touch
};

// Every target is filled, and every block read is what was written, or it throws: Error(kDamaged)
// naming the file and the size, or the block and its offset; Error(kSystem) with errno and path,
// EWOULDBLOCK where the file is being overwritten; Error(kBadValue) for a request that contradicts
// itself. Targets may then hold anything. Host memory: a block for each thread.
void read_shard(Env& env, const ShardRequest& request);

}  // namespace tradewind
