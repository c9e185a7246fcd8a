// What kernels ask of the machine, and the only lines that differ between nvcc and the tests, which
// compile the same sources for the host: there, cuda_runtime.h is tests/cpp/cuda_emulation's, where
// blocks are loops and threads are fibers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TRADEWIND_UNROLL _Pragma("unroll")
#else
#define TRADEWIND_UNROLL
#endif

namespace tradewind::cuda {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;
inline constexpr int kWarpThreads = 32;

// Elements of arrays are read and written by these alone: the emulation counts their bytes and
// checks their alignment. Pointers from a table in memory could point anywhere, for all that nvcc
// knows: with the assumption it emits instructions for global memory.
template <class T>
__device__ __forceinline__ T load_global(const T* address) {
#if defined(__CUDACC__)
  __builtin_assume(__isGlobal(address));
  return *address;
#else
  return cuda_emulation::load(address);
#endif
}

template <class T>
__device__ __forceinline__ void store_global(T* address, T value) {
#if defined(__CUDACC__)
  __builtin_assume(__isGlobal(address));
  *address = value;
#else
  cuda_emulation::store(address, value);
#endif
}

// The block's shared memory, of the size given to launch().
template <class T>
__device__ __forceinline__ T* shared_memory() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char tradewind_shared_memory[];
  return reinterpret_cast<T*>(tradewind_shared_memory);
#else
  return static_cast<T*>(cuda_emulation::shared_memory());
#endif
}

__device__ __forceinline__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % kWarpThreads;
}
__device__ __forceinline__ int warp_of_thread() {
  return static_cast<int>(threadIdx.x) / kWarpThreads;
}

template <class To, class From>
__device__ __forceinline__ To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Queues the kernel, unless there is nothing to do. Returns a CUDA error code.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), std::int64_t num_blocks, int num_threads,
           int num_shared_bytes, void* stream, const Arguments&... arguments) {
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks < 0 || num_blocks > 0x7FFFFFFF) return cudaErrorInvalidValue;
#if defined(__CUDACC__)
  kernel<<<static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_threads),
           static_cast<unsigned>(num_shared_bytes), static_cast<cudaStream_t>(stream)>>>(
      arguments...);
  return cudaGetLastError();
#else
  static_cast<void>(stream);
  return cuda_emulation::launch(static_cast<unsigned>(num_blocks),
                                static_cast<unsigned>(num_threads),
                                static_cast<std::size_t>(num_shared_bytes),
                                [&] { kernel(static_cast<Parameters>(arguments)...); });
#endif
}

}  // namespace tradewind::cuda
