// The four neighbouring elements of an array that one thread takes, moved between memory and
// registers as they are stored: in one access where they are aligned, else one by one. Decoding is
// apart (column.cuh), so that the loads of all arrays are under way before the first is used.
#pragma once

#include "base/bfloat16.h"
#include "base/cuda/device.cuh"

namespace tradewind::cuda {

inline constexpr int kThreadElements = 4;

// Narrow elements lie one after the other, the first in the lowest bits. Where T is float, a stored
// float64 is rounded to a float here.
template <class T>
struct Raw {
  std::uint32_t words[sizeof(T)];  // room for four elements of T
};

// The integers of an element's width and of four elements.
template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using One = std::uint8_t;
  using Four = std::uint32_t;
};
template <>
struct Word<2> {
  using One = std::uint16_t;
  using Four = uint2;
};
template <>
struct Word<4> {
  using One = std::uint32_t;
  using Four = uint4;
};

template <int kBytes, class T>
__device__ __forceinline__ std::uint32_t element(const Raw<T>& raw, int i) {
  constexpr int kInWord = 4 / kBytes;
  constexpr std::uint32_t kMask = 0xFFFFFFFFU >> (32 - 8 * kBytes);
  return raw.words[i / kInWord] >> (8 * kBytes * (i % kInWord)) & kMask;
}

// In ascending order of i: the first of a word clears it.
template <int kBytes, class T>
__device__ __forceinline__ void set_element(Raw<T>& raw, int i, std::uint32_t bits) {
  constexpr int kInWord = 4 / kBytes;
  const std::uint32_t before = i % kInWord == 0 ? 0U : raw.words[i / kInWord];
  raw.words[i / kInWord] = before | bits << (8 * kBytes * (i % kInWord));
}

template <class T>
__device__ __forceinline__ double wide_element(const Raw<T>& raw, int i) {
  if constexpr (sizeof(T) == 8) {
    return bit_cast<double>(std::uint64_t{raw.words[2 * i + 1]} << 32U | raw.words[2 * i]);
  } else {
    return static_cast<double>(float_of(raw.words[i]));
  }
}

template <class T>
__device__ __forceinline__ void set_wide_element(Raw<T>& raw, int i, double value) {
  if constexpr (sizeof(T) == 8) {
    const auto bits = bit_cast<std::uint64_t>(value);
    raw.words[2 * i] = static_cast<std::uint32_t>(bits);
    raw.words[2 * i + 1] = static_cast<std::uint32_t>(bits >> 32U);
  } else {
    raw.words[i] = bits_of(static_cast<float>(value));
  }
}

template <class Access>
__device__ __forceinline__ bool is_aligned(const void* address) {
  return bit_cast<std::uintptr_t>(address) % sizeof(Access) == 0;
}

// `count` elements, at most four, of one, two or four bytes.
template <int kBytes, class T>
__device__ __forceinline__ void fetch_narrow(const void* address, int count, Raw<T>& raw) {
  using Four = typename Word<kBytes>::Four;
  if (count == kThreadElements && is_aligned<Four>(address)) {
    const Four four = load_global(static_cast<const Four*>(address));
    memcpy(raw.words, &four, sizeof(four));
    return;
  }
  const auto* elements = static_cast<const typename Word<kBytes>::One*>(address);
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    set_element<kBytes>(raw, i, i < count ? load_global(elements + i) : 0U);
  }
}

template <int kBytes, class T>
__device__ __forceinline__ void put_narrow(void* address, int count, const Raw<T>& raw) {
  using Four = typename Word<kBytes>::Four;
  if (count == kThreadElements && is_aligned<Four>(address)) {
    Four four;
    memcpy(&four, raw.words, sizeof(four));
    store_global(static_cast<Four*>(address), four);
    return;
  }
  using One = typename Word<kBytes>::One;
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    if (i < count) {
      store_global(static_cast<One*>(address) + i, static_cast<One>(element<kBytes>(raw, i)));
    }
  }
}

// float64: two accesses of two.
template <class T>
__device__ __forceinline__ void fetch_wide(const void* address, int count, Raw<T>& raw) {
  if (sizeof(T) == 8 && count == kThreadElements && is_aligned<uint4>(address)) {
    TRADEWIND_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 two = load_global(static_cast<const uint4*>(address) + pair);
      memcpy(&raw.words[4 * pair % sizeof(T)], &two, sizeof(two));
    }
    return;
  }
  const auto* elements = static_cast<const double*>(address);
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    set_wide_element(raw, i, i < count ? load_global(elements + i) : 0.0);
  }
}

template <class T>
__device__ __forceinline__ void put_wide(void* address, int count, const Raw<T>& raw) {
  if (sizeof(T) == 8 && count == kThreadElements && is_aligned<uint4>(address)) {
    TRADEWIND_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      uint4 two;
      memcpy(&two, &raw.words[4 * pair % sizeof(T)], sizeof(two));
      store_global(static_cast<uint4*>(address) + pair, two);
    }
    return;
  }
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    if (i < count) store_global(static_cast<double*>(address) + i, wide_element(raw, i));
  }
}

}  // namespace tradewind::cuda
