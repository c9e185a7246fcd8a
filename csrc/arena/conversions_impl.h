// The floating dtypes as kernels read and write them, one element or many: included by the kernels'
// bodies of each room, with TRADEWIND_ISA_NAMESPACE defined. All is local to the unit, compiled for
// its ISA. No standard library functions here: the linker would keep one ISA's copy for all.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "base/bfloat16.h"

namespace tradewind::TRADEWIND_ISA_NAMESPACE {
namespace {

struct Float32 {
  using Stored = float;
  using Compute = float;
  static TRADEWIND_RULE float load(float stored) { return stored; }
  static TRADEWIND_RULE float store(float value) { return value; }
};

struct Float64 {
  using Stored = double;
  using Compute = double;
  static TRADEWIND_RULE double load(double stored) { return stored; }
  static TRADEWIND_RULE double store(double value) { return value; }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Compute = float;
  static TRADEWIND_RULE float load(std::uint16_t stored) { return from_bfloat16(stored); }
  static TRADEWIND_RULE std::uint16_t store(float value) { return to_bfloat16(value); }
};

struct Float16 {
  using Stored = _Float16;
  using Compute = float;
  static TRADEWIND_RULE float load(_Float16 stored) { return static_cast<float>(stored); }
  static TRADEWIND_RULE _Float16 store(float value) { return static_cast<_Float16>(value); }
};

template <class T, class Type>
void decode_as(const void* stored, std::int64_t count, T* __restrict out) {
  // SAFETY: the caller promises `count` elements of Type behind `stored`.
  const auto* __restrict typed = static_cast<const typename Type::Stored*>(stored);
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(Type::load(typed[i]));
}

#if defined(__F16C__)
// The compiler converts _Float16 one by one; these are the same conversions, eight at a time.
template <>
void decode_as<float, Float16>(const void* stored, std::int64_t count, float* __restrict out) {
  const auto* __restrict typed = static_cast<const _Float16*>(stored);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(typed + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  for (; i < count; ++i) out[i] = Float16::load(typed[i]);
}
#endif

template <class T, class Type>
void encode_as(const T* __restrict values, std::int64_t count, void* stored) {
  auto* __restrict typed = static_cast<typename Type::Stored*>(stored);
  for (std::int64_t i = 0; i < count; ++i) {
    typed[i] = Type::store(static_cast<typename Type::Compute>(values[i]));
  }
}

#if defined(__F16C__)
template <>
void encode_as<float, Float16>(const float* __restrict values, std::int64_t count, void* stored) {
  auto* __restrict typed = static_cast<_Float16*>(stored);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(typed + i), half);
  }
  for (; i < count; ++i) typed[i] = Float16::store(values[i]);
}
#endif

}  // namespace
}  // namespace tradewind::TRADEWIND_ISA_NAMESPACE
