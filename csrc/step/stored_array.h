// Whole arrays between float32 and the formats that take more than a cast. Not hot: for state that
// is loaded, saved or looked at.
#pragma once

#include <cstdint>

namespace tradewind {

// Rounds to the nearest code. `exponents`: one for each exponent block.
void encode_blocks(const float* values, std::int64_t num_elements, bool has_sign,
                   std::uint8_t* codes, std::uint8_t* exponents);
void decode_blocks(const std::uint8_t* codes, const std::uint8_t* exponents,
                   std::int64_t num_elements, bool has_sign, float* values);

void split_floats(const float* values, std::int64_t num_elements, std::uint16_t* high,
                  std::uint16_t* low);
void join_floats(const std::uint16_t* high, const std::uint16_t* low, std::int64_t num_elements,
                 float* values);

}  // namespace tradewind
