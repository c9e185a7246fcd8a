// The inner loops of sharing, compiled once per ISA and chosen at run time: what turns a rank's
// values into wire bytes and back, and the sum of all ranks' parts in rank order. Same input, same
// bits on every ISA: fixed order, no contraction, denormals kept. Kernels touch no global state but
// the calling thread's floating-point control register, which they restore.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "arena/dtype.h"
#include "share/codec.h"
#include "share/low_rank.h"

namespace tradewind {

// Values, errors and parts need only their element's alignment, wires that of 4 bytes (none for
// Codec::kNone). Arrays must not overlap but where said. Lossy codecs compute in float32.

// values -> wire_bytes() bytes. Where `error` is not null, it is added to the values first, and
// what the wire lost of that sum is left in it (error feedback): value + error - what the wire
// says, in float32. Where that is not finite it becomes 0: one bad step does not spoil the next.
using EncodeKernel = void (*)(const void* values, std::int64_t num_elements, float* error,
                              std::byte* wire);
using DecodeKernel = void (*)(const std::byte* wire, std::int64_t num_elements, void* values);

// One rank's part of a sum: wire bytes, or this rank's own values as they are.
struct SumPart {
  const void* data;
  bool is_values;
};

// values = (part 0 + part 1 + ...) / divisor, added in the order given and divided in float32
// (float64 where the values are), rounded once. At least one part; `values` may be one of them, if
// that is_values (any, for Codec::kNone).
using SumKernel = void (*)(const SumPart* parts, std::int64_t num_parts, std::int64_t num_elements,
                           double divisor, void* values);

// The products of LowRankMatrix, of some rows (project, rebuild) or columns (project_transposed) of
// a matrix of float32.
struct LowRankKernels {
  // sum += values, and sum -= values; null for float64.
  void (*add[kNumFloatingDTypes])(const void* values, std::int64_t num_elements, float* sum);
  void (*subtract[kNumFloatingDTypes])(const void* values, std::int64_t num_elements, float* sum);
  void (*project)(const float* matrix, const LowRankShape& shape, const float* right,
                  std::int64_t first, std::int64_t last, float* left);
  void (*project_transposed)(const float* matrix, const LowRankShape& shape, const float* left,
                             std::int64_t first, std::int64_t last, float* right);
  // values = left x right. Unless `error` is null, left x own_right is taken off it; where what is
  // left is not finite it becomes 0.
  void (*rebuild[kNumFloatingDTypes])(const float* left, const float* right, const float* own_right,
                                      const LowRankShape& shape, std::int64_t first,
                                      std::int64_t last, float* error, void* values);
};

struct ShareKernels {
  std::string_view isa;
  // By codec and the values' dtype. Null where a codec does not take the dtype, and for encode and
  // decode of Codec::kNone, whose wire is the values' bytes.
  EncodeKernel encode[kNumCodecs][kNumFloatingDTypes];
  DecodeKernel decode[kNumCodecs][kNumFloatingDTypes];
  SumKernel sum[kNumCodecs][kNumFloatingDTypes];
  LowRankKernels low_rank;
};

// Those of this process (base/isa.h).
const ShareKernels& share_kernels();
// Takes the names of supported_isas().
const ShareKernels& share_kernels_for(std::string_view isa);

}  // namespace tradewind
