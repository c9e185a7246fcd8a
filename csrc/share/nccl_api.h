// The part of NCCL's public C interface that is used here, declared anew, so that a build needs
// neither NCCL nor CUDA. Written after the API reference of NCCL 2.28; every value and signature
// below is unchanged from the version named with it up to 2.29. Must match nccl.h:
// tests/cpp/share/nccl_header_test.cpp compares where there is one. No memory is owned here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tradewind::nccl {

struct Communicator;  // NCCL's own, never looked into
using CommHandle = Communicator*;

struct UniqueId {
  char internal[128];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,  // 2.13
  kInProgress = 7,   // 2.14
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,  // 2.10
};

// Made ones count up from 5.
enum RedOp : int {
  kSum = 0,
  kProd = 1,
  kMax = 2,
  kMin = 3,
  kAvg = 4,  // 2.10
};

enum ScalarResidence : int { kScalarDevice = 0, kScalarHostImmediate = 1 };

inline constexpr int kShrinkDefault = 0;
inline constexpr int kShrinkAbort = 1;  // gives up what is queued first

// The configuration as 2.14 had it. NCCL reads `size` bytes of it, and by `version` which members
// those are; the rest keep their defaults.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

// 2.18.5 is 21805.
constexpr int version_code(int major, int minor, int patch) {
  return major * 10000 + minor * 100 + patch;  // since 2.9
}

// The functions, by their names without the prefix. Streams are cudaStream_t.
using GetVersion = Result (*)(int* version);
using GetUniqueId = Result (*)(UniqueId* id);
using GetErrorString = const char* (*)(Result result);
using GetLastError = const char* (*)(CommHandle comm);  // 2.13
using CommInitRankConfig = Result (*)(CommHandle* comm, int num_ranks, UniqueId id, int rank,
                                      Config* config);  // 2.14
using CommFinalize = Result (*)(CommHandle comm);       // 2.14
using CommDestroy = Result (*)(CommHandle comm);
using CommAbort = Result (*)(CommHandle comm);
using CommGetAsyncError = Result (*)(CommHandle comm, Result* error);
using CommShrink = Result (*)(CommHandle comm, int* excluded, int num_excluded, CommHandle* made,
                              Config* config, int flags);  // 2.27
using CommRegister = Result (*)(CommHandle comm, void* data, std::size_t num_bytes,
                                void** handle);                    // 2.19
using CommDeregister = Result (*)(CommHandle comm, void* handle);  // 2.19
using MemAlloc = Result (*)(void** data, std::size_t num_bytes);   // 2.19
using MemFree = Result (*)(void* data);                            // 2.19
using GroupStart = Result (*)();
using GroupEnd = Result (*)();
using AllReduce = Result (*)(const void* input, void* output, std::size_t count, DataType type,
                             RedOp op, CommHandle comm, void* stream);
using ReduceScatter = Result (*)(const void* input, void* output, std::size_t part_count,
                                 DataType type, RedOp op, CommHandle comm, void* stream);
using AllGather = Result (*)(const void* input, void* output, std::size_t part_count, DataType type,
                             CommHandle comm, void* stream);
using Broadcast = Result (*)(const void* input, void* output, std::size_t count, DataType type,
                             int root, CommHandle comm, void* stream);
using Send = Result (*)(const void* input, std::size_t count, DataType type, int peer,
                        CommHandle comm, void* stream);  // 2.7
using Recv = Result (*)(void* output, std::size_t count, DataType type, int peer, CommHandle comm,
                        void* stream);  // 2.7
using RedOpCreatePreMulSum = Result (*)(RedOp* op, void* scalar, DataType type,
                                        ScalarResidence residence, CommHandle comm);  // 2.11
using RedOpDestroy = Result (*)(RedOp op, CommHandle comm);                           // 2.11

}  // namespace tradewind::nccl
