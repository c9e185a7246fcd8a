// What is done to a bucket between collective calls, on the bucket's device: codecs, sums in rank
// order, and the search for values that are not finite. On the CPU by the kernels of share/ and
// step/, serially, as it is not the step's thread that asks; on a GPU by libtradewind_cuda and
// torch, queued on `stream`, the thread's current one. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arena/dtype.h"
#include "share/codec.h"

namespace tradewind {

// Some values, and how they travel.
struct BucketRun {
  Codec codec = Codec::kNone;
  DType dtype = DType::kFloat32;
  std::int64_t num_elements = 0;
};

// One run of each rank, at equal distances.
struct RankParts {
  const std::byte* first = nullptr;
  std::int64_t part_bytes = 0;  // from one to the next
  int num_parts = 0;
};

class BucketArithmetic {
 public:
  virtual ~BucketArithmetic() = default;

  // As EncodeKernel, DecodeKernel and SumKernel of share/kernels.h.
  virtual void encode(const BucketRun& run, const void* values, float* error, std::byte* wire,
                      void* stream) = 0;
  virtual void decode(const BucketRun& run, const std::byte* wire, void* values, void* stream) = 0;
  virtual void sum(const BucketRun& run, const RankParts& parts, double divisor, void* values,
                   void* stream) = 0;
  virtual void divide(const BucketRun& run, double divisor, void* values, void* stream) = 0;
  virtual void copy(const void* from, void* to, std::int64_t num_bytes, void* stream) = 0;
  // sizes[i] is finite exactly where all of slots[i] are. `slots`: one-dimensional, of one dtype,
  // which is that of `sizes`.
  virtual void note_sizes(const std::vector<at::Tensor>& slots, const at::Tensor& sizes) = 0;
};

// `library_path`: of libtradewind_cuda, opened at the first codec or ordered sum on a GPU.
// `emulates`: a GPU's arithmetic on the CPU, where the library's kernels run there: for tests.
std::unique_ptr<BucketArithmetic> make_bucket_arithmetic(c10::Device device,
                                                         std::string library_path,
                                                         bool emulates = false);

}  // namespace tradewind
