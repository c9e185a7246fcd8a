// An array in any stored format, encoded and decoded by the tests' own definitions.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "step/random_formats.h"
#include "step/sample_values.h"

namespace tradewind {

struct StoredArray {
  Format format = Format::kFloat32;
  std::vector<std::byte> bytes;
  std::vector<std::uint8_t> exponents;  // of the 8-bit formats

  [[nodiscard]] std::size_t size() const {
    return bytes.size() / static_cast<std::size_t>(format_bytes(format));
  }
  template <class Stored>
  [[nodiscard]] Stored at(std::size_t idx) const {
    Stored stored{};
    std::memcpy(&stored, bytes.data() + idx * sizeof(stored), sizeof(stored));
    return stored;
  }
  template <class Stored>
  void put(std::size_t idx, Stored stored) {
    std::memcpy(bytes.data() + idx * sizeof(stored), &stored, sizeof(stored));
  }
  [[nodiscard]] std::uint8_t exponent_of(std::size_t idx) const {
    return exponents[idx / kExponentBlockElements];
  }
  // The first elements: of 8-bit formats as they are, though another largest one may be missing.
  [[nodiscard]] StoredArray head(std::size_t count) const {
    StoredArray first = *this;
    first.bytes.resize(count * static_cast<std::size_t>(format_bytes(format)));
    if (!exponents.empty()) first.exponents.resize((count + 255) / 256);
    return first;
  }
  friend bool operator==(const StoredArray&, const StoredArray&) = default;
};

template <class T>
std::vector<T> decode_array(const StoredArray& array) {
  std::vector<T> values(array.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (array.format == Format::kSigned8) {
      values[i] = static_cast<T>(
          BlockReference<true>::decode(array.at<std::uint8_t>(i), array.exponent_of(i)));
    } else if (array.format == Format::kPositive8) {
      values[i] = static_cast<T>(
          BlockReference<false>::decode(array.at<std::uint8_t>(i), array.exponent_of(i)));
    } else {
      visit_format(sampled_dtype(array.format), [&]<class Type>() {
        values[i] = static_cast<T>(Type::decode(array.at<typename Type::Stored>(i)));
      });
    }
  }
  return values;
}

// What an array rounds with: the bits of elements from first_element on, as state number `state`.
struct Randomness {
  std::uint32_t key = 0;
  std::int64_t first_element = 0;
  int state = 0;

  [[nodiscard]] std::uint32_t half(std::size_t idx) const {
    return random_half(random_bits(key, first_element + static_cast<std::int64_t>(idx)), state);
  }
};

template <bool kHasSign, class T>
void encode_blocks(const std::vector<T>& values, const Randomness& randomness, StoredArray& array) {
  using Block = BlockReference<kHasSign>;
  for (std::size_t first = 0; first < values.size(); first += kExponentBlockElements) {
    const std::size_t end = std::min(values.size(), first + kExponentBlockElements);
    float largest = 0.0F;
    for (std::size_t i = first; i < end; ++i) {
      const float magnitude = std::fabs(static_cast<float>(values[i]));
      if (!(magnitude <= largest) && !std::isnan(largest)) largest = magnitude;
    }
    array.exponents.push_back(Block::block_exponent(largest));
    for (std::size_t i = first; i < end; ++i) {
      array.put(i, Block::encode(static_cast<float>(values[i]), array.exponents.back(),
                                 randomness.half(i)));
    }
  }
}

// All but float64 by way of float32.
template <class T>
StoredArray encode_array(Format format, const std::vector<T>& values,
                         const Randomness& randomness = {}) {
  StoredArray array{format, {}, {}};
  array.bytes.resize(values.size() * static_cast<std::size_t>(format_bytes(format)));
  if (format == Format::kSigned8) {
    encode_blocks<true>(values, randomness, array);
  } else if (format == Format::kPositive8) {
    encode_blocks<false>(values, randomness, array);
  } else if (format == Format::kStochasticBFloat16) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      array.put(i, reference_stochastic(static_cast<float>(values[i]), randomness.half(i)));
    }
  } else {
    visit_format(static_cast<DType>(format), [&]<class Type>() {
      for (std::size_t i = 0; i < values.size(); ++i) {
        array.put(i, Type::encode(static_cast<typename Type::Compute>(values[i])));
      }
    });
  }
  return array;
}

inline StoredArray sample_array(Format format, std::uint64_t seed, std::size_t count,
                                bool is_positive = false) {
  std::vector<double> values;
  visit_format(sampled_dtype(format), [&]<class Type>() {
    for (const auto stored : sample_values<Type>(seed, count)) {
      const double value = Type::decode(stored);
      values.push_back(is_positive ? std::fabs(value) : value);
    }
  });
  return encode_array(format, values, {static_cast<std::uint32_t>(seed), 0, 0});
}

// Equal bits, or both NaN: which of two NaNs' signs and payloads an addition keeps is left open by
// IEEE 754, and the codes of a block that decodes to NaN mean nothing.
inline void expect_same_array(const StoredArray& expected, const StoredArray& got,
                              const std::string& what) {
  if (expected == got) return;
  ASSERT_EQ(expected.format, got.format) << what;
  ASSERT_EQ(expected.size(), got.size()) << what;
  ASSERT_EQ(expected.exponents, got.exponents) << what;
  const std::vector<double> expected_values = decode_array<double>(expected);
  const std::vector<double> got_values = decode_array<double>(got);
  for (std::size_t i = 0; i < expected_values.size(); ++i) {
    ASSERT_TRUE(same_value<Float64Format>(expected_values[i], got_values[i]))
        << what << "[" << i << "] of " << expected_values.size() << ": expected "
        << expected_values[i] << ", got " << got_values[i];
  }
}

}  // namespace tradewind
