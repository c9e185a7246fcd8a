// Values that tell codecs apart: ordinary, huge, tiny and not finite ones, as a dtype can hold
// them.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/fenced_array.h"
#include "base/split_mix.h"
#include "share/wire_reference.h"
#include "step/sample_values.h"

namespace tradewind {

// Every tail of every vector width, and lengths around the ends of blocks.
inline std::vector<std::size_t> share_lengths() {
  std::vector<std::size_t> all{509, 510,  511,  512,  513,  514, 515,
                               527, 1023, 1024, 1025, 1029, 2600};
  for (std::size_t length = 0; length <= 67; ++length) all.push_back(length);
  return all;
}

enum class Sample : std::uint8_t { kOrdinary, kHuge, kTiny, kZero, kNotFinite };
inline constexpr Sample kSamples[] = {Sample::kOrdinary, Sample::kHuge, Sample::kTiny,
                                      Sample::kZero, Sample::kNotFinite};

// Largest finite value of a format.
template <class Type>
double largest_value() {
  if constexpr (std::is_same_v<Type, Float16Format>) return 65504.0;
  if constexpr (std::is_same_v<Type, BFloat16Format>) return BFloat16Format::decode(0x7F7F);
  return static_cast<double>(std::numeric_limits<float>::max());
}

template <class Type>
std::vector<typename Type::Stored> share_values(Sample sample, std::uint64_t seed,
                                                std::size_t num_elements) {
  auto values = sample_values<Type>(seed, num_elements);
  SplitMix random(seed + 1);
  if (sample == Sample::kNotFinite) sprinkle_nonfinite<Type>(seed, values);
  for (auto& value : values) {
    const double uniform = random.uniform();
    if (sample == Sample::kHuge) value = Type::encode(uniform * largest_value<Type>());
    if (sample == Sample::kTiny)
      value = Type::encode(std::round(200.0 * uniform) * smallest_value<Type>());
    if (sample == Sample::kZero) value = Type::encode(std::copysign(0.0, uniform));
  }
  return values;
}

template <class Type>
std::vector<float> as_floats(const std::vector<typename Type::Stored>& stored) {
  std::vector<float> values;
  for (const auto value : stored) values.push_back(static_cast<float>(Type::decode(value)));
  return values;
}

inline Bytes bytes_of(FencedArray<std::uint32_t>& words) {
  const std::vector<std::uint32_t> values = words.values();
  Bytes bytes(values.size() * 4);
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A wire of its own, aligned to 4 and nothing more.
inline FencedArray<std::uint32_t> fenced_wire(const Bytes& bytes) {
  FencedArray<std::uint32_t> words(bytes.size() / 4);
  if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

inline std::byte* wire_of(FencedArray<std::uint32_t>& words) {
  return reinterpret_cast<std::byte*>(words.data());
}

}  // namespace tradewind
