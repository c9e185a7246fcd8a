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

namespace tradewind {

// values -> wire_bytes() bytes. Where `error` is not null, it is added to the values first, and
// what the wire lost of that sum is left in it (error feedback).
using EncodeKernel = void (*)(const void* values, std::int64_t num_elements, float* error,
                              std::byte* wire);
using DecodeKernel = void (*)(const std::byte* wire, std::int64_t num_elements, void* values);

// One rank's part of a sum: wire bytes, or this rank's own values as they are.
struct SumPart {
  const void* data;
  bool is_values;
};

// values = (part 0 + part 1 + ...) / divisor, added in the order given in float32 (float64 where
// the values are), rounded once. `values` may be one of the parts.
using SumKernel = void (*)(const SumPart* parts, std::int64_t num_parts, std::int64_t num_elements,
                           double divisor, void* values);

struct ShareKernels {
  std::string_view isa;
  // By codec and the values' dtype (arena_dtype index of a floating one). Null where a codec does
  // not take the dtype, and for encode and decode of Codec::kNone, whose wire is the values' bytes.
  EncodeKernel encode[kNumCodecs][kNumFloatingDTypes];
  DecodeKernel decode[kNumCodecs][kNumFloatingDTypes];
  SumKernel sum[kNumCodecs][kNumFloatingDTypes];
};

// Those of this process: the best ISA of this processor, or TRADEWIND_ISA.
const ShareKernels& share_kernels();
// Throws Error(kBadValue) for an ISA that is unknown or not supported here.
const ShareKernels& share_kernels_for(std::string_view isa);

}  // namespace tradewind
