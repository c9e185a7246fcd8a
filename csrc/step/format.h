// How numbers are stored between steps, and the conversion of one element each way: shared by the
// CPU kernels, CUDA and tests, in integer and IEEE arithmetic alone, so that all agree to the bit.
// Arithmetic itself is float32 (float64 for float64 parameters).
#pragma once

#include <cstdint>

#include "arena/dtype.h"
#include "base/bfloat16.h"

namespace tradewind {

// The first ones are DType's floating ones, in DType's order.
enum class Format : std::uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,            // rounded to nearest even
  kFloat16,             // rounded to nearest even
  kStochasticBFloat16,  // rounded up or down at random, without bias
  kSigned8,             // 8-bit floats that share an exponent by block, rounded at random
  kPositive8,           // the same without a sign, for states that are never negative
};

constexpr Format format_of(DType dtype) { return static_cast<Format>(dtype); }

constexpr std::int64_t format_bytes(Format format) {
  constexpr std::int64_t kBytes[] = {4, 8, 2, 2, 2, 1, 1};
  return kBytes[static_cast<int>(format)];
}

constexpr bool is_blockwise(Format format) { return format >= Format::kSigned8; }

// How a 16-bit parameter's exact value is kept.
enum class Master : std::uint8_t {
  kNone,     // it is not: the parameter is all there is
  kFloat32,  // a float32 beside it
  kSplit,    // bfloat16 only: the 16 bits that the parameter lacks
};

// Elements that share an exponent in the 8-bit formats. Divides kNormBlockElements.
inline constexpr std::int64_t kExponentBlockElements = 256;

constexpr std::int64_t num_exponent_blocks(std::int64_t num_elements) {
  return (num_elements + kExponentBlockElements - 1) / kExponentBlockElements;
}

// Chris Wellons' "lowbias32" integer hash (public domain).
TRADEWIND_RULE std::uint32_t mix_bits(std::uint32_t x) {
  x ^= x >> 16U;
  x *= 0x7FEB352DU;
  x ^= x >> 15U;
  x *= 0x846CA68BU;
  x ^= x >> 16U;
  return x;
}

// What random_bits() makes of its key for an element and those that share its upper 32 bits: loops
// over a few elements then count in 32 bits.
TRADEWIND_RULE std::uint32_t random_key_near(std::uint32_t key, std::int64_t element) {
  return key ^ static_cast<std::uint32_t>(static_cast<std::uint64_t>(element) >> 32U) * 0x9E3779B9U;
}

// 32 bits for one element of one parameter at one step. The key holds seed, step and parameter
// (random_key()).
TRADEWIND_RULE std::uint32_t random_bits(std::uint32_t key, std::int64_t element) {
  return mix_bits(static_cast<std::uint32_t>(element) ^ random_key_near(key, element));
}

// SplitMix64's finalizer (Steele, Lea and Flood, 2014) over the three.
TRADEWIND_RULE std::uint32_t random_key(std::uint64_t seed, std::int64_t step,
                                        std::int64_t parameter) {
  std::uint64_t x = seed + 0x9E3779B97F4A7C15U * (static_cast<std::uint64_t>(step) + 1U);
  for (int round = 0; round < 2; ++round) {
    x ^= static_cast<std::uint64_t>(parameter) * 0xD1B54A32D192ED03U;
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    x ^= x >> 31U;
  }
  return static_cast<std::uint32_t>(x >> 32U);
}

// The 16 of an element's 32 random bits that its state number `state` rounds with.
TRADEWIND_RULE std::uint32_t random_half(std::uint32_t random, int state) {
  if (state == 0) return random & 0xFFFFU;
  if (state == 1) return random >> 16U;
  return (random * 0x9E3779B1U) >> 16U;
}

// Up with the probability of the part that is cut off. Infinities stay; a value that rounds beyond
// the largest finite one becomes infinite, as it does when rounded to nearest.
TRADEWIND_RULE std::uint16_t to_bfloat16_stochastic(float value, std::uint32_t random_half) {
  const std::uint32_t bits = bits_of(value);
  const bool is_infinite = (bits & 0x7FFFFFFFU) == 0x7F800000U;
  const std::uint32_t rounded = (bits + (is_infinite ? 0U : random_half)) >> 16U;
  return static_cast<std::uint16_t>(value != value ? 0x7FC0U : rounded);
}

// A float32 as its bfloat16 (nearest, ties away from zero) and the 16 bits that are missing, which
// count from that bfloat16: join(split(x)) == x for every x but NaN payloads. Ties go away from
// zero, unlike in to_bfloat16(), because two neighbours would share a remainder otherwise; so the
// bfloat16 must come from here and from nowhere else.
struct SplitFloat {
  std::uint16_t high;
  std::uint16_t low;
};

TRADEWIND_RULE SplitFloat split_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t high = (bits + 0x8000U) >> 16U;
  const bool is_nan = value != value;
  return {static_cast<std::uint16_t>(is_nan ? 0x7FC0U : high),
          static_cast<std::uint16_t>(is_nan ? 0U : bits - (high << 16U))};
}

TRADEWIND_RULE float join_float(std::uint16_t high, std::uint16_t low) {
  const auto offset =
      static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int16_t>(low)));
  return float_of((static_cast<std::uint32_t>(high) << 16U) + offset);
}

// --- 8-bit floats that share an exponent by block -----------------------------------------------
// A code is the top of a float32's bits, counted from the block's exponent: code c > 0 stands for
// float_of((block exponent << 23) + (c << kDroppedBits)); code 0 is zero. Unsigned codes have 5
// exponent and 3 mantissa bits (a range of 2^32 under the block's largest), signed ones a sign, 4
// and 3 (2^16). As in the microscaling formats (Rouhani et al., 2023, arXiv:2310.10537) the shared
// scale is a power of two, so nothing is lost by it.
inline constexpr std::uint32_t kDroppedBits = 20;

template <bool kHasSign>
struct BlockFloat {
  static constexpr std::uint32_t kMagnitudeCodes = kHasSign ? 128 : 256;
  static constexpr std::int32_t kExponents = kHasSign ? 16 : 32;
  // The smallest block exponent: 2^-107, so that the inverse below stays finite.
  static constexpr std::int32_t kLeastExponent = 20;
  static constexpr std::uint8_t kNotFinite = 255;

  // Of a block whose largest magnitude has these bits: such that rounding up still fits. A block
  // with an infinity or NaN decodes to NaN throughout.
  static TRADEWIND_RULE std::uint8_t block_exponent(std::uint32_t largest_bits) {
    const auto exponent = static_cast<std::int32_t>(largest_bits >> 23U);
    const std::int32_t base = exponent + 2 - kExponents;
    const std::int32_t kept = base < kLeastExponent ? kLeastExponent : base;
    return static_cast<std::uint8_t>(exponent == 255 ? kNotFinite : kept);
  }

  static TRADEWIND_RULE float decode(std::uint8_t code, std::uint8_t block_exponent) {
    const std::uint32_t magnitude = code & (kMagnitudeCodes - 1U);
    const std::uint32_t base = static_cast<std::uint32_t>(block_exponent) << 23U;
    const std::uint32_t sign = kHasSign ? (static_cast<std::uint32_t>(code) & 128U) << 24U : 0U;
    const std::uint32_t bits = magnitude == 0 ? 0U : base + (magnitude << kDroppedBits);
    return float_of(block_exponent == kNotFinite ? 0x7FC00000U : (bits | sign));
  }

  // What encode() needs of a block.
  struct Scale {
    std::uint32_t base, smallest;  // bits of code 0, had it been a number, and of code 1
    float halves;                  // 65536 / the value of code 1
  };
  static TRADEWIND_RULE Scale scale_of(std::uint8_t block_exponent) {
    const std::uint32_t base = static_cast<std::uint32_t>(block_exponent) << 23U;
    const std::uint32_t smallest = base + (1U << kDroppedBits);
    return {base, smallest, 65536.0F / float_of(smallest)};
  }

  // Rounds up or down at random without bias, below the smallest code too: there the distance to
  // zero is no matter of bits, so values are compared.
  static TRADEWIND_RULE std::uint8_t encode(float value, const Scale& scale,
                                            std::uint32_t random_half) {
    const std::uint32_t all_bits = bits_of(value);
    const std::uint32_t bits = all_bits & 0x7FFFFFFFU;
    const std::uint32_t rounded = (bits - scale.base + (random_half << 4U)) >> kDroppedBits;
    const bool is_up = float_of(bits) * scale.halves > static_cast<float>(random_half);
    const std::uint32_t magnitude = bits < scale.smallest ? (is_up ? 1U : 0U) : rounded;
    return static_cast<std::uint8_t>(magnitude | (kHasSign ? (all_bits >> 24U) & 128U : 0U));
  }
};

}  // namespace tradewind
