// Values that tell kernels apart: most of ordinary size, some zero, subnormal, tiny or large.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/split_mix.h"
#include "step/stored_formats.h"

namespace tradewind {

// The smallest positive value of a format: a subnormal.
template <class Type>
double smallest_value() {
  if constexpr (sizeof(typename Type::Stored) == 2) {
    return Type::decode(1);
  } else {
    return std::numeric_limits<typename Type::Stored>::denorm_min();
  }
}

template <class Type>
std::vector<typename Type::Stored> sample_values(std::uint64_t seed, std::size_t num_elements) {
  SplitMix random(seed);
  std::vector<typename Type::Stored> values(num_elements);
  for (auto& value : values) {
    double sample = random.uniform();
    switch (random.below(16)) {
      case 0: sample = std::copysign(0.0, sample); break;
      case 1: sample = std::copysign(smallest_value<Type>(), sample); break;
      case 2: sample *= 1000.0 * smallest_value<Type>(); break;
      case 3: sample *= 30000.0; break;
      case 4: sample *= 1e-3; break;
      default: break;
    }
    value = Type::encode(sample);
  }
  return values;
}

// Second moments are sums of squares.
template <class Type>
std::vector<typename Type::Stored> sample_magnitudes(std::uint64_t seed, std::size_t num_elements) {
  auto values = sample_values<Type>(seed, num_elements);
  for (auto& value : values) value = Type::encode(std::fabs(Type::decode(value)));
  return values;
}

// Puts NaN and infinities of both signs here and there, differently for each seed.
template <class Type>
void sprinkle_nonfinite(std::uint64_t seed, std::vector<typename Type::Stored>& values) {
  SplitMix random(seed);
  for (auto& value : values) {
    const std::int64_t kind = random.below(24);
    if (kind == 0) value = Type::encode(std::numeric_limits<double>::quiet_NaN());
    if (kind == 1) value = Type::encode(std::numeric_limits<double>::infinity());
    if (kind == 2) value = Type::encode(-std::numeric_limits<double>::infinity());
  }
}

}  // namespace tradewind
