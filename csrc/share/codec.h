// How values travel between ranks. The wire of a lossy codec is a row of blocks, one behind the
// other: a header (4 bytes of float, for codecs that have one) and a code for each value, padded
// with zeros to a multiple of 4 bytes. So every block begins at a multiple of 4, and runs of values
// may lie back to back. Numbers are in the machine's byte order.
#pragma once

#include <cstdint>
#include <string_view>

#include "arena/dtype.h"

namespace tradewind {

enum class Codec : std::uint8_t {
  kNone,      // the values' own bytes
  kBfloat16,  // 2 bytes, rounded to nearest even
  kFloat16,   // 2 bytes, and a power of two per block that keeps finite values finite
  kInt8,      // 1 byte, and a scale per block
};
inline constexpr int kNumCodecs = 4;
// Values that share a header; the last block of a run may be shorter.
inline constexpr std::int64_t kCodecBlockElements = 512;

// "none", "bf16", "fp16" or "int8". Throws Error(kBadValue) naming the codecs that there are.
Codec codec_named(std::string_view name);
std::string_view name_of(Codec codec);
// Whether values of this dtype can travel so: kNone takes all floating ones, the others float32,
// bfloat16 and float16.
bool takes(Codec codec, DType dtype);
// Bytes on the wire of a run of values. Runs begin at a block.
std::int64_t wire_bytes(Codec codec, DType dtype, std::int64_t num_elements);

}  // namespace tradewind
