// Bodies of PowerSGD's products, included by kernels_impl.h: see there. Sums go in a fixed order,
// so that all ISAs agree to the bit.
#include "arena/conversions_impl.h"
#include "base/subnormals.h"
#include "share/codes.h"
#include "share/kernels.h"

namespace tradewind::TRADEWIND_ISA_NAMESPACE {
namespace {

// Columns of a thin matrix and of some rows that L1 holds together.
constexpr std::int64_t kLowRankColumns = 512;
constexpr std::int64_t kLowRankRows = 8;
constexpr std::int64_t kLanes = 16;

template <class Type, bool kSubtracts>
void add_values(const void* values, std::int64_t num_elements, float* __restrict sum) {
  const KeepSubnormals keep_subnormals;
  const auto* typed = static_cast<const typename Type::Stored*>(values);
  alignas(64) float buffer[kLowRankColumns];
  for (std::int64_t first = 0; first < num_elements; first += kLowRankColumns) {
    const std::int64_t left = num_elements - first;
    const std::int64_t count = left < kLowRankColumns ? left : kLowRankColumns;
    decode_as<float, Type>(typed + first, count, buffer);
    for (std::int64_t i = 0; i < count; ++i) {
      sum[first + i] = kSubtracts ? sum[first + i] - buffer[i] : sum[first + i] + buffer[i];
    }
  }
}

float dot_in_lanes(const float* __restrict a, const float* __restrict b, std::int64_t count) {
  alignas(64) float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

void project(const float* matrix, const LowRankShape& shape, const float* right, std::int64_t first,
             std::int64_t last, float* left) {
  const KeepSubnormals keep_subnormals;
  for (std::int64_t row = first; row < last; ++row) {
    for (std::int64_t k = 0; k < shape.rank; ++k) {
      left[k * shape.rows + row] =
          dot_in_lanes(matrix + row * shape.cols, right + k * shape.cols, shape.cols);
    }
  }
}

// sum += factors[0] * vectors[0] + factors[factor_stride] * vectors[vector_stride] + ..., added one
// after the other; four at a time stay in registers.
void add_multiples(float* __restrict sum, const float* __restrict vectors,
                   std::int64_t vector_stride, const float* __restrict factors,
                   std::int64_t factor_stride, std::int64_t num_vectors, std::int64_t count) {
  std::int64_t v = 0;
  for (; v + 4 <= num_vectors; v += 4) {
    const float* __restrict a = vectors + v * vector_stride;
    const float* __restrict b = a + vector_stride;
    const float* __restrict c = b + vector_stride;
    const float* __restrict d = c + vector_stride;
    const float* f = factors + v * factor_stride;
    const float fa = f[0], fb = f[factor_stride], fc = f[2 * factor_stride];
    const float fd = f[3 * factor_stride];
    for (std::int64_t i = 0; i < count; ++i) {
      sum[i] = (((sum[i] + fa * a[i]) + fb * b[i]) + fc * c[i]) + fd * d[i];
    }
  }
  for (; v < num_vectors; ++v) {
    const float* __restrict a = vectors + v * vector_stride;
    const float factor = factors[v * factor_stride];
    for (std::int64_t i = 0; i < count; ++i) sum[i] += factor * a[i];
  }
}

void project_transposed(const float* matrix, const LowRankShape& shape, const float* left,
                        std::int64_t first, std::int64_t last, float* right) {
  const KeepSubnormals keep_subnormals;
  for (std::int64_t begin = first; begin < last; begin += kLowRankColumns) {
    const std::int64_t count = last - begin < kLowRankColumns ? last - begin : kLowRankColumns;
    for (std::int64_t k = 0; k < shape.rank; ++k) {
      for (std::int64_t i = 0; i < count; ++i) right[k * shape.cols + begin + i] = 0.0F;
    }
    for (std::int64_t row = 0; row < shape.rows; row += kLowRankRows) {
      const std::int64_t rest = shape.rows - row;
      const std::int64_t num_rows = rest < kLowRankRows ? rest : kLowRankRows;
      for (std::int64_t k = 0; k < shape.rank; ++k) {
        add_multiples(right + k * shape.cols + begin, matrix + row * shape.cols + begin, shape.cols,
                      left + k * shape.rows + row, 1, num_rows, count);
      }
    }
  }
}

template <class Type>
void rebuild(const float* left, const float* right, const float* own_right,
             const LowRankShape& shape, std::int64_t first, std::int64_t last, float* error,
             void* values) {
  const KeepSubnormals keep_subnormals;
  auto* typed = static_cast<typename Type::Stored*>(values);
  alignas(64) float sum[kLowRankColumns];
  const auto make_row = [&](const float* thin, std::int64_t row, std::int64_t begin,
                            std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) sum[i] = 0.0F;
    add_multiples(sum, thin + begin, shape.cols, left + row, shape.rows, shape.rank, count);
  };
  for (std::int64_t row = first; row < last; ++row) {
    for (std::int64_t begin = 0; begin < shape.cols; begin += kLowRankColumns) {
      const std::int64_t rest = shape.cols - begin;
      const std::int64_t count = rest < kLowRankColumns ? rest : kLowRankColumns;
      const std::int64_t at = row * shape.cols + begin;
      if (error != nullptr) {
        make_row(own_right, row, begin, count);
        float* __restrict kept = error + at;
        for (std::int64_t i = 0; i < count; ++i) kept[i] = lost(kept[i], sum[i]);
      }
      make_row(right, row, begin, count);
      encode_as<float, Type>(sum, count, typed + at);
    }
  }
}

constexpr LowRankKernels make_low_rank_kernels() {
  return {
      {&add_values<Float32, false>, nullptr, &add_values<BFloat16, false>,
       &add_values<Float16, false>},
      {&add_values<Float32, true>, nullptr, &add_values<BFloat16, true>,
       &add_values<Float16, true>},
      &project,
      &project_transposed,
      {&rebuild<Float32>, nullptr, &rebuild<BFloat16>, &rebuild<Float16>},
  };
}

}  // namespace
}  // namespace tradewind::TRADEWIND_ISA_NAMESPACE
