// The measure of values by the contract of the norm, written out: element i of a block adds to lane
// i mod 32 in float64, lanes are then halved five times; and the largest magnitude and the zeros.
#pragma once

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "arena/layout.h"
#include "step/kernels.h"
#include "step/stored_formats.h"

namespace tradewind {

// Numbers in the order of the contract.
inline double reference_lane_sum(const std::vector<double>& numbers) {
  std::array<double, 32> lanes{};
  for (std::size_t i = 0; i < numbers.size(); ++i) lanes[i % 32] += numbers[i];
  for (std::size_t width = 16; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

inline double larger_abs(double largest, double value) {
  if (std::isnan(largest) || std::isnan(value)) return std::numeric_limits<double>::quiet_NaN();
  return std::fmax(largest, std::fabs(value));
}

template <class Type>
std::vector<BlockMeasure> reference_measures(const std::vector<typename Type::Stored>& values) {
  std::vector<BlockMeasure> blocks;
  for (std::size_t begin = 0; begin < values.size(); begin += kNormBlockElements) {
    BlockMeasure block{};
    std::vector<double> squares;
    const std::size_t end = std::min(values.size(), begin + kNormBlockElements);
    for (std::size_t i = begin; i < end; ++i) {
      const double value = Type::decode(values[i]);
      squares.push_back(value * value);
      block.max_abs = larger_abs(block.max_abs, value);
      block.num_zeros += value == 0.0 ? 1 : 0;
    }
    block.sum_of_squares = reference_lane_sum(squares);
    blocks.push_back(block);
  }
  return blocks;
}

// Equal to the bit; all NaNs are one.
inline bool same_measure(const BlockMeasure& a, const BlockMeasure& b) {
  return same_value<Float64Format>(a.sum_of_squares, b.sum_of_squares) &&
         same_value<Float64Format>(a.max_abs, b.max_abs) && a.num_zeros == b.num_zeros;
}

}  // namespace tradewind
