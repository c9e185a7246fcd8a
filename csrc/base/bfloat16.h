// float32 by its bits, and bfloat16: shared by the CPU kernels, CUDA and tests, in integer
// arithmetic alone, so that all agree to the bit.
#pragma once

#include <cstdint>

#include "base/always_inline.h"

namespace tradewind {

#if defined(__CUDA_ARCH__)
TRADEWIND_RULE std::uint32_t bits_of(float value) { return __float_as_uint(value); }
TRADEWIND_RULE float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
#else
TRADEWIND_RULE std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}
TRADEWIND_RULE float float_of(std::uint32_t bits) {
  float value = 0.0F;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
#endif

TRADEWIND_RULE float from_bfloat16(std::uint16_t stored) {
  return float_of(static_cast<std::uint32_t>(stored) << 16U);
}

// By integers, with torch's NaN (0x7FC0): AVX-512's own conversion flushes subnormals.
TRADEWIND_RULE std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
  return static_cast<std::uint16_t>(value != value ? 0x7FC0U : rounded);
}

}  // namespace tradewind
