#include "share/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "share/kernels.h"

namespace tradewind {
namespace {

// What is left of a float32 vector after taking others off is noise below this part of it.
constexpr double kNoise = 1e-5;
// Elements of a matrix that are worth a thread.
constexpr std::int64_t kGrainElements = 32 * 1024;

// SplitMix64 (Steele et al., 2014), as a number in [-1, 1).
float random_at(std::uint64_t seed, std::uint64_t idx) {
  std::uint64_t x = seed + (idx + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  x ^= x >> 31U;
  return static_cast<float>(static_cast<std::int64_t>(x) >> 40U) * 0x1p-23F;
}

void fill_randomly(std::span<float> vector, std::uint64_t seed) {
  for (std::size_t i = 0; i < vector.size(); ++i) vector[i] = random_at(seed, i);
}

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return sum;
}

void take_off(std::span<float> vector, std::span<const float> direction) {
  const double part = dot(vector, direction);
  for (std::size_t i = 0; i < vector.size(); ++i) {
    vector[i] = static_cast<float>(static_cast<double>(vector[i]) -
                                   part * static_cast<double>(direction[i]));
  }
}

bool make_unit(std::span<float> vector, double norm, double at_least) {
  if (!std::isfinite(norm) || norm <= at_least) return false;
  for (float& value : vector) value = static_cast<float>(static_cast<double>(value) / norm);
  return true;
}

// Whether anything of the vector is left beside those before it.
bool make_orthonormal(std::span<float> vector, std::span<const float> before) {
  const double norm = std::sqrt(dot(vector, vector));
  if (!make_unit(vector, norm, std::numeric_limits<float>::min())) return false;
  for (int round = 0; round < 2; ++round) {
    for (std::size_t at = 0; at < before.size(); at += vector.size()) {
      take_off(vector, before.subspan(at, vector.size()));
    }
  }
  return make_unit(vector, std::sqrt(dot(vector, vector)), kNoise);
}

bool all_finite(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

}  // namespace

LowRankShape low_rank_shape(std::int64_t rows, std::int64_t cols, std::int64_t wanted_rank) {
  LowRankShape shape{rows, cols, std::min({wanted_rank, rows, cols})};
  // Not (rows + cols) * rank * 2, which might overflow.
  if (shape.rank > 0 && rows * cols / shape.rank / 2 < rows + cols) shape.rank = 0;
  return shape;
}

void orthonormalize(std::span<float> vectors, std::int64_t length, std::uint64_t seed) {
  const auto size = static_cast<std::size_t>(length);
  std::uint64_t num_random = 0;
  for (std::size_t begin = 0; begin < vectors.size(); begin += size) {
    const std::span<float> vector = vectors.subspan(begin, size);
    while (!make_orthonormal(vector, vectors.first(begin))) {
      fill_randomly(vector, seed + ++num_random * static_cast<std::uint64_t>(length));
    }
  }
}

LowRankMatrix::LowRankMatrix(const LowRankShape& shape, std::uint64_t seed)
    : shape_(shape),
      seed_(seed),
      error_(static_cast<std::size_t>(shape.rows * shape.cols)),
      right_(static_cast<std::size_t>(shape.right_elements())),
      left_(static_cast<std::size_t>(shape.left_elements())),
      own_right_(right_.size()) {
  orthonormalize(right_, shape_.cols, seed_);
}

void LowRankMatrix::project(const void* values, DType dtype, const Parallel& parallel,
                            float* left) {
  const ShareKernels& kernels = share_kernels();
  const auto* bytes = static_cast<const std::byte*>(values);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / shape_.cols);
  parallel.for_ranges(shape_.rows, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; row += grain) {  // while it is in the cache
      const std::int64_t end = std::min(row + grain, last);
      const std::int64_t begin = row * shape_.cols;
      kernels.low_rank.add[static_cast<int>(dtype)](
          bytes + begin * element_bytes(dtype), (end - row) * shape_.cols, error_.data() + begin);
      kernels.low_rank.project(error_.data(), shape_, right_.data(), row, end, left);
    }
  });
  is_in_ = true;
}

void LowRankMatrix::stay_away(bool is_finite, float* left) {
  const float value = is_finite ? 0.0F : std::numeric_limits<float>::quiet_NaN();
  std::fill_n(left, shape_.left_elements(), value);
  is_in_ = false;
}

void LowRankMatrix::turn(const float* left, const Parallel& parallel, float* right) {
  is_lost_ = !all_finite(left, shape_.left_elements());
  if (is_lost_ || !is_in_) {
    std::fill_n(right, shape_.right_elements(), 0.0F);
  }
  if (is_lost_) return;
  std::copy_n(left, left_.size(), left_.begin());
  orthonormalize(left_, shape_.rows, ~seed_);
  if (is_in_) {
    const std::int64_t grain = std::max<std::int64_t>(64, kGrainElements / shape_.rows);
    parallel.for_ranges(shape_.cols, grain, [&](std::int64_t first, std::int64_t last) {
      share_kernels().low_rank.project_transposed(error_.data(), shape_, left_.data(), first, last,
                                                  right);
    });
  }
  std::copy_n(right, own_right_.size(), own_right_.begin());
}

void LowRankMatrix::rebuild(const float* right, double factor, const Parallel& parallel,
                            DType dtype, void* values) {
  if (is_lost_) {
    keep(dtype, values);
    std::fill(left_.begin(), left_.end(), std::numeric_limits<float>::quiet_NaN());
  } else {
    for (std::size_t i = 0; i < right_.size(); ++i) {
      right_[i] = static_cast<float>(static_cast<double>(right[i]) * factor);
    }
  }
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / shape_.cols);
  float* error = is_in_ ? error_.data() : nullptr;
  parallel.for_ranges(shape_.rows, grain, [&](std::int64_t first, std::int64_t last) {
    share_kernels().low_rank.rebuild[static_cast<int>(dtype)](
        left_.data(), right_.data(), own_right_.data(), shape_, first, last, error, values);
  });
  orthonormalize(right_, shape_.cols, seed_);
  is_in_ = false;
}

void LowRankMatrix::keep(DType dtype, const void* values) {
  if (!is_in_) return;
  share_kernels().low_rank.subtract[static_cast<int>(dtype)](values, shape_.rows * shape_.cols,
                                                             error_.data());
  is_in_ = false;
}

}  // namespace tradewind
