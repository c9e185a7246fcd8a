// The codes of one block, shared by the CPU kernels, CUDA and tests, in integer and IEEE arithmetic
// alone, so that all agree to the bit. Magnitudes are the bits of |x|: in their order infinity
// comes after all numbers and NaN after infinity, so that one maximum finds both.
#pragma once

#include <cstdint>

#include "base/bfloat16.h"
#include "share/codec.h"

namespace tradewind {

inline constexpr std::uint32_t kInfinityBits = 0x7F800000;
inline constexpr std::uint32_t kQuietNaNBits = 0x7FC00000;

TRADEWIND_RULE constexpr std::int64_t header_bytes(Codec codec) {
  return codec == Codec::kFloat16 || codec == Codec::kInt8 ? 4 : 0;
}

// Of a lossy codec's block. Whole blocks: a multiple of 4 from the first to the next.
TRADEWIND_RULE constexpr std::int64_t wire_block_bytes(Codec codec, std::int64_t num_elements) {
  const std::int64_t codes = codec == Codec::kInt8 ? num_elements : 2 * num_elements;
  return header_bytes(codec) + (codes + 3) / 4 * 4;
}

TRADEWIND_RULE std::uint32_t magnitude_of(float value) { return bits_of(value) & 0x7FFFFFFFU; }

// What error feedback keeps. Where the loss is no number, nothing: one bad step must not spoil the
// ones after it.
TRADEWIND_RULE float lost(float value, float decoded) {
  const float loss = value - decoded;
  return magnitude_of(loss) < kInfinityBits ? loss : 0.0F;
}

// --- float16 under a power of two ---------------------------------------------------------------

struct GuardedHalf {
  static constexpr std::uint32_t kLargest = 0x477FE000;   // 65504
  static constexpr std::uint32_t kOverflow = 0x477FF000;  // 65520: what rounds to infinity
  // Beyond 2^112 a value that rounds up to the next power of two would decode to infinity. The last
  // values before float32's end are cut to 65504 * 2^112 instead.
  static constexpr std::uint32_t kMaxExponent = 112;

  // log2 of the header, from the block's largest finite magnitude.
  static TRADEWIND_RULE std::uint32_t exponent_of(std::uint32_t largest) {
    if (largest < kOverflow) return 0;
    const bool rounds_up = (largest & 0x7FFFFFU) >= (kOverflow & 0x7FFFFFU);
    const std::uint32_t exponent = (largest >> 23U) - (kOverflow >> 23U) + (rounds_up ? 1U : 0U);
    return exponent < kMaxExponent ? exponent : kMaxExponent;
  }
  static TRADEWIND_RULE float scale_of(std::uint32_t exponent) {
    return float_of((127U + exponent) << 23U);
  }
  static TRADEWIND_RULE float inverse_of(std::uint32_t exponent) {
    return float_of((127U - exponent) << 23U);
  }

  // What is rounded to float16: exact but where it is subnormal, which float16 has no code for.
  static TRADEWIND_RULE float scaled(float value, float inverse) {
    const std::uint32_t bits = bits_of(value * inverse);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    const bool is_beyond = magnitude > kLargest && magnitude < kInfinityBits;
    const std::uint32_t kept = (bits ^ magnitude) | (is_beyond ? kLargest : magnitude);
    return float_of(magnitude > kInfinityBits ? kQuietNaNBits : kept);
  }
};

// --- 8-bit integers under a scale ---------------------------------------------------------------

struct ScaledInt8 {
  // NaN for a block with an infinity or NaN, which decodes to NaN throughout; 0 for one of zeros.
  static TRADEWIND_RULE float scale_of(std::uint32_t largest) {
    if (largest >= kInfinityBits) return float_of(kQuietNaNBits);
    const float scale = float_of(largest) / 127.0F;
    const float decoded = scale * 127.0F;
    // Rounding moves a subnormal scale by much: up, so that the largest value stays within 127.
    if (bits_of(scale) < 0x00800000U && decoded < float_of(largest)) {
      return float_of(bits_of(scale) + 1U);
    }
    // And down where float32 ends, so that it stays finite.
    return float_of(bits_of(scale) - (bits_of(decoded) == kInfinityBits ? 1U : 0U));
  }
  static TRADEWIND_RULE bool is_number(float scale) {
    return bits_of(scale) - 1U < kInfinityBits - 1U;
  }

  // x / scale to nearest even: adding 1.5 * 2^23 leaves the integer in the lowest bits.
  static TRADEWIND_RULE std::uint8_t encode(float value, float scale) {
    return static_cast<std::uint8_t>(bits_of(value / scale + 12582912.0F));
  }
  static TRADEWIND_RULE float decode(std::uint8_t code, float scale) {
    return static_cast<float>(static_cast<std::int8_t>(code)) * scale;
  }
};

}  // namespace tradewind
