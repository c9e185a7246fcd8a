// The formats that round at random or keep what rounding cuts off, from their definitions and by
// arithmetic on doubles: nothing here is shared with step/format.h, which works on bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "step/stored_formats.h"

namespace tradewind {

// A finite float32 as a multiple of the last place of its bfloat16: exact, as that is a power of
// two.
struct BFloat16Places {
  explicit BFloat16Places(float value)
      : exponent((value == 0.0F ? -126 : std::max(std::ilogb(value), -126)) - 7),
        count(std::ldexp(std::fabs(double{value}), -exponent)) {}

  int exponent;
  double count;
};

// Up where the part that is cut off, in 65536ths, and the random half sum to one whole place.
inline std::uint16_t reference_stochastic(float value, std::uint32_t random_half) {
  if (!std::isfinite(value)) return BFloat16Format::encode(value);
  const BFloat16Places places(value);
  const double below = std::floor(places.count);
  const bool is_up = (places.count - below) * 65536.0 + random_half >= 65536.0;
  const double rounded = std::ldexp(below + (is_up ? 1.0 : 0.0), places.exponent);
  return BFloat16Format::encode(std::copysign(rounded, value));
}

struct ReferenceSplit {
  std::uint16_t high;
  std::uint16_t low;
};

// The nearest bfloat16, ties away from zero, and how many float32 values lie between it and the
// value, negative where the value is nearer to zero.
inline ReferenceSplit reference_split(float value) {
  if (!std::isfinite(value)) return {BFloat16Format::encode(value), 0};
  const BFloat16Places places(value);
  const double rounded = std::ldexp(std::floor(places.count + 0.5), places.exponent);
  const std::uint16_t high = BFloat16Format::encode(std::copysign(rounded, value));
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return {high, static_cast<std::uint16_t>(std::int64_t{bits} - (std::int64_t{high} << 16))};
}

// 8-bit floats whose block shares an exponent: 3 mantissa bits under 4 exponent bits and a sign, or
// under 5 exponent bits. Code 0 is zero, code 1 therefore 1.125 * 2^(block exponent - 127).
template <bool kHasSign>
struct BlockReference {
  static constexpr int kMagnitudes = kHasSign ? 128 : 256;
  static constexpr std::uint8_t kNotFinite = 255;

  static double decode(int code, int block_exponent) {
    if (block_exponent == kNotFinite) return std::numeric_limits<double>::quiet_NaN();
    const int magnitude = code % kMagnitudes;
    const double value = magnitude == 0 ? 0.0
                                        : std::ldexp(1.0 + magnitude % 8 / 8.0,
                                                     block_exponent - 127 + magnitude / 8);
    return code >= kMagnitudes ? -value : value;
  }

  // The largest lies one exponent below the top one, so that rounding up cannot leave the range;
  // not under 2^-107.
  static std::uint8_t block_exponent(float largest) {
    if (!std::isfinite(largest)) return kNotFinite;
    const int exponent = largest < 0x1p-126F ? -127 : std::ilogb(largest);
    return static_cast<std::uint8_t>(std::max(exponent + 127 - (kMagnitudes / 8 - 2), 20));
  }

  // Between two codes: up where the way above the lower one, in 65536ths of their distance cut to
  // whole ones, and the random half sum to 65536. Below code 1: up where that part, as a product in
  // float32, is above the random half.
  static std::uint8_t encode(float value, int block_exponent, std::uint32_t random_half) {
    if (block_exponent == kNotFinite) return 0;
    const double magnitude = std::fabs(double{value});
    const double smallest = decode(1, block_exponent);
    int code = 0;
    if (magnitude < smallest) {
      const float part = std::fabs(value) * (65536.0F / static_cast<float>(smallest));
      code = part > static_cast<float>(random_half) ? 1 : 0;
    } else {
      const int exponent = std::ilogb(magnitude);
      const double eighths = std::ldexp(magnitude, 3 - exponent) - 8.0;
      const double below = std::floor(eighths);
      const bool is_up = std::floor((eighths - below) * 65536.0) + random_half >= 65536.0;
      code = (exponent + 127 - block_exponent) * 8 + static_cast<int>(below) + (is_up ? 1 : 0);
    }
    return static_cast<std::uint8_t>(code + (kHasSign && std::signbit(value) ? 128 : 0));
  }
};

}  // namespace tradewind
