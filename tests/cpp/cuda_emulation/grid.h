// An emulated grid for kernels that are compiled for the host: blocks run one after the other,
// threads as fibers that are switched where they wait for each other, in an order that a seed
// shuffles, so that a missing sync changes a result. It finds threads that wait for ones that have
// finished, misaligned accesses, and counts bytes and launches. For one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace cuda_emulation {

struct Counts {
  std::int64_t loaded_bytes = 0;
  std::int64_t stored_bytes = 0;
  std::int64_t launches = 0;
};

// The order of warps within a block and of lanes within a warp: ascending for 0, shuffled by any
// other seed.
void set_order(std::uint64_t seed);
Counts& counts();
// What went wrong since it was cleared, which stops all launches; empty where nothing has.
std::string& failure();

// --- for cuda_runtime.h and base/cuda/device.cuh ------------------------------------------------

inline constexpr unsigned kWarpThreads = 32;
inline constexpr int kLaunchFailure = 719;  // cudaErrorLaunchFailure

// Runs `thread` for each thread of each block.
int launch(unsigned num_blocks, unsigned num_threads, std::size_t num_shared_bytes,
           const std::function<void()>& thread);

void* shared_memory();
void fail_access(const void* address, std::size_t bytes);

template <class T>
T load(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) fail_access(address, sizeof(T));
  counts().loaded_bytes += static_cast<std::int64_t>(sizeof(T));
  T value;
  std::memcpy(&value, static_cast<const void*>(address), sizeof(value));
  return value;
}

template <class T>
void store(T* address, const T& value) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) fail_access(address, sizeof(T));
  counts().stored_bytes += static_cast<std::int64_t>(sizeof(T));
  std::memcpy(static_cast<void*>(address), &value, sizeof(value));
}

// Waits for the block's threads.
void sync_block();
// Waits for the warp's threads, which must all call it for the same operation, and gives back what
// lane `source` has brought.
enum class WarpOperation : std::uint8_t { kSync, kShuffle, kBallot };
std::uint64_t exchange(unsigned mask, WarpOperation operation, std::uint64_t brought,
                       unsigned source);
std::uint32_t ballot(unsigned mask, bool vote);

}  // namespace cuda_emulation
