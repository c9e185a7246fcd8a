#include "step/stored_array.h"

#include <algorithm>

#include "base/subnormals.h"
#include "step/format.h"

namespace tradewind {
namespace {

// Half a step: what random rounding adds on average.
constexpr std::uint32_t kHalf = 0x8000;

template <bool kHasSign>
void encode(const float* values, std::int64_t num_elements, std::uint8_t* codes,
            std::uint8_t* exponents) {
  using Block = BlockFloat<kHasSign>;
  for (std::int64_t first = 0; first < num_elements; first += kExponentBlockElements) {
    const std::int64_t end = std::min(first + kExponentBlockElements, num_elements);
    std::uint32_t largest = 0;
    for (std::int64_t i = first; i < end; ++i) {
      largest = std::max(largest, bits_of(values[i]) & 0x7FFFFFFFU);
    }
    const std::uint8_t exponent = Block::block_exponent(largest);
    exponents[first / kExponentBlockElements] = exponent;
    const typename Block::Scale scale = Block::scale_of(exponent);
    for (std::int64_t i = first; i < end; ++i) codes[i] = Block::encode(values[i], scale, kHalf);
  }
}

template <bool kHasSign>
void decode(const std::uint8_t* codes, const std::uint8_t* exponents, std::int64_t num_elements,
            float* values) {
  for (std::int64_t i = 0; i < num_elements; ++i) {
    values[i] = BlockFloat<kHasSign>::decode(codes[i], exponents[i / kExponentBlockElements]);
  }
}

}  // namespace

void encode_blocks(const float* values, std::int64_t num_elements, bool has_sign,
                   std::uint8_t* codes, std::uint8_t* exponents) {
  const KeepSubnormals keep_subnormals;
  (has_sign ? &encode<true> : &encode<false>)(values, num_elements, codes, exponents);
}

void decode_blocks(const std::uint8_t* codes, const std::uint8_t* exponents,
                   std::int64_t num_elements, bool has_sign, float* values) {
  (has_sign ? &decode<true> : &decode<false>)(codes, exponents, num_elements, values);
}

void split_floats(const float* values, std::int64_t num_elements, std::uint16_t* high,
                  std::uint16_t* low) {
  for (std::int64_t i = 0; i < num_elements; ++i) {
    const SplitFloat split = split_float(values[i]);
    high[i] = split.high;
    low[i] = split.low;
  }
}

void join_floats(const std::uint16_t* high, const std::uint16_t* low, std::int64_t num_elements,
                 float* values) {
  for (std::int64_t i = 0; i < num_elements; ++i) values[i] = join_float(high[i], low[i]);
}

}  // namespace tradewind
