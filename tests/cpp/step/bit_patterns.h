// float32 values by their bits: random ones of every exponent, and those where conversions go
// wrong.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/split_mix.h"

namespace tradewind {

inline float float_with(std::uint32_t bits) {
  float value = 0.0F;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline std::uint32_t bits_in(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Around the middle and the ends of every bfloat16's surroundings, for both signs and all
// exponents; then random bits. NaN and infinities are among them.
inline std::vector<float> telling_floats(std::size_t num_random) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      values.push_back(float_with((high << 16U) + low));
    }
  }
  SplitMix random(1);
  for (std::size_t i = 0; i < num_random; ++i) {
    values.push_back(float_with(static_cast<std::uint32_t>(random.next())));
  }
  return values;
}

// The largest distance of a mean of num_trials coin tosses from its probability that chance
// explains: 6 standard errors, which fail one run in 5e8. The error is no less than one toss's.
inline double coin_bound(double probability, double num_trials) {
  return 6.0 * std::sqrt(probability * (1.0 - probability) / num_trials) + 1.0 / num_trials;
}

}  // namespace tradewind
