// One array of a slot, in any format: fetched, decoded, encoded and put back by pieces. The format
// is the same for a whole block of threads, so that its switches diverge nowhere. The same bits as
// the CPU's Array (step/kernels_impl.h).
#pragma once

#include "base/cuda/half.cuh"
#include "base/cuda/raw.cuh"
#include "step/format.h"

namespace tradewind::cuda {

// A thread's part of a slot: `count` elements, from none to four.
struct Piece {
  std::int64_t first;
  int count;
};

__device__ __forceinline__ int bytes_of(Format format) {
  switch (format) {
    case Format::kFloat32: return 4;
    case Format::kFloat64: return 8;
    case Format::kSigned8:
    case Format::kPositive8: return 1;
    default: return 2;
  }
}

__device__ __forceinline__ bool has_block_exponent(Format format) {
  return format >= Format::kSigned8;
}

__device__ __forceinline__ bool rounds_at_random(Format format) {
  return format >= Format::kStochasticBFloat16;
}

struct Column {
  void* data;
  std::uint8_t* exponents;
  Format format;

  template <class T>
  __device__ __forceinline__ void fetch(const Piece& piece, Raw<T>& raw) const {
    const int bytes = bytes_of(format);
    const void* address = static_cast<std::uint8_t*>(data) + piece.first * bytes;
    switch (bytes) {
      case 1: fetch_narrow<1>(address, piece.count, raw); break;
      case 2: fetch_narrow<2>(address, piece.count, raw); break;
      case 4: fetch_narrow<4>(address, piece.count, raw); break;
      default: fetch_wide(address, piece.count, raw); break;
    }
  }

  template <class T>
  __device__ __forceinline__ void put(const Piece& piece, const Raw<T>& raw) const {
    const int bytes = bytes_of(format);
    void* address = static_cast<std::uint8_t*>(data) + piece.first * bytes;
    switch (bytes) {
      case 1: put_narrow<1>(address, piece.count, raw); break;
      case 2: put_narrow<2>(address, piece.count, raw); break;
      case 4: put_narrow<4>(address, piece.count, raw); break;
      default: put_wide(address, piece.count, raw); break;
    }
  }

  [[nodiscard]] __device__ __forceinline__ std::uint8_t fetch_exponent(const Piece& piece) const {
    if (!has_block_exponent(format) || piece.count == 0) return 0;
    return exponents[piece.first / kExponentBlockElements];
  }
};

template <Format kFormat, class T>
__device__ __forceinline__ void decode_as(const Raw<T>& raw, std::uint8_t exponent,
                                          T (&values)[kThreadElements]) {
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    if constexpr (kFormat == Format::kFloat32) {
      values[i] = static_cast<T>(float_of(element<4>(raw, i)));
    } else if constexpr (kFormat == Format::kFloat64) {
      values[i] = static_cast<T>(wide_element(raw, i));
    } else if constexpr (kFormat == Format::kBFloat16) {
      values[i] = static_cast<T>(from_bfloat16(static_cast<std::uint16_t>(element<2>(raw, i))));
    } else if constexpr (kFormat == Format::kFloat16) {
      values[i] = static_cast<T>(from_float16(static_cast<std::uint16_t>(element<2>(raw, i))));
    } else {
      constexpr bool kHasSign = kFormat == Format::kSigned8;
      const auto code = static_cast<std::uint8_t>(element<1>(raw, i));
      values[i] = static_cast<T>(BlockFloat<kHasSign>::decode(code, exponent));
    }
  }
}

template <class T>
__device__ __forceinline__ void decode(Format format, const Raw<T>& raw, std::uint8_t exponent,
                                       T (&values)[kThreadElements]) {
  switch (format) {
    case Format::kFloat32: decode_as<Format::kFloat32>(raw, exponent, values); break;
    case Format::kFloat64: decode_as<Format::kFloat64>(raw, exponent, values); break;
    case Format::kFloat16: decode_as<Format::kFloat16>(raw, exponent, values); break;
    case Format::kSigned8: decode_as<Format::kSigned8>(raw, exponent, values); break;
    case Format::kPositive8: decode_as<Format::kPositive8>(raw, exponent, values); break;
    default: decode_as<Format::kBFloat16>(raw, exponent, values); break;
  }
}

// What an encoding needs beside the values. Formats that are neither random nor 8-bit need nothing.
struct Rounding {
  std::uint32_t random[kThreadElements];
  int state;              // which of the rule's states this is
  std::uint32_t largest;  // bits of the exponent block's largest magnitude
};

template <bool kHasSign, class T>
__device__ __forceinline__ std::uint8_t encode_block(const T (&values)[kThreadElements],
                                                     const Rounding& rounding, Raw<T>& raw) {
  using Block = BlockFloat<kHasSign>;
  const std::uint8_t exponent = Block::block_exponent(rounding.largest);
  const typename Block::Scale scale = Block::scale_of(exponent);
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    const std::uint32_t half = random_half(rounding.random[i], rounding.state);
    set_element<1>(raw, i, Block::encode(static_cast<float>(values[i]), scale, half));
  }
  return exponent;
}

template <Format kFormat, class T>
__device__ __forceinline__ void encode_as(const T (&values)[kThreadElements],
                                          const Rounding& rounding, Raw<T>& raw) {
  TRADEWIND_UNROLL
  for (int i = 0; i < kThreadElements; ++i) {
    const auto value = static_cast<float>(values[i]);
    if constexpr (kFormat == Format::kFloat32) {
      set_element<4>(raw, i, bits_of(value));
    } else if constexpr (kFormat == Format::kFloat64) {
      set_wide_element(raw, i, static_cast<double>(values[i]));
    } else if constexpr (kFormat == Format::kBFloat16) {
      set_element<2>(raw, i, to_bfloat16(value));
    } else if constexpr (kFormat == Format::kFloat16) {
      set_element<2>(raw, i, to_float16(value));
    } else {
      const std::uint32_t half = random_half(rounding.random[i], rounding.state);
      set_element<2>(raw, i, to_bfloat16_stochastic(value, half));
    }
  }
}

// Rounds to the column's format and stores; of 8-bit formats, the exponent too.
template <class T>
__device__ __forceinline__ void encode(const Column& column, const Piece& piece,
                                       const T (&values)[kThreadElements],
                                       const Rounding& rounding) {
  Raw<T> raw;
  std::uint8_t exponent = 0;
  switch (column.format) {
    case Format::kFloat32: encode_as<Format::kFloat32>(values, rounding, raw); break;
    case Format::kFloat64: encode_as<Format::kFloat64>(values, rounding, raw); break;
    case Format::kFloat16: encode_as<Format::kFloat16>(values, rounding, raw); break;
    case Format::kStochasticBFloat16:
      encode_as<Format::kStochasticBFloat16>(values, rounding, raw);
      break;
    case Format::kSigned8: exponent = encode_block<true>(values, rounding, raw); break;
    case Format::kPositive8: exponent = encode_block<false>(values, rounding, raw); break;
    default: encode_as<Format::kBFloat16>(values, rounding, raw); break;
  }
  column.put(piece, raw);
  if (has_block_exponent(column.format) && piece.count > 0 &&
      piece.first % kExponentBlockElements == 0) {
    store_global(column.exponents + piece.first / kExponentBlockElements, exponent);
  }
}

}  // namespace tradewind::cuda
