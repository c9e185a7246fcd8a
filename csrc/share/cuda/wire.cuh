// A codec's block on the wire: its header and codes, in words of four bytes, which wires are
// aligned to. The same codes as on the CPU (share/codes.h).
#pragma once

#include "base/cuda/warp_max.cuh"
#include "share/cuda/block.cuh"

namespace tradewind::cuda {

template <Codec kCodec>
struct DeviceCodec;

template <>
struct DeviceCodec<Codec::kBfloat16> {
  static constexpr int kCodeBytes = 2;
  // Of the magnitude of one value, what the block's largest is taken of.
  static __device__ __forceinline__ std::uint32_t counted(std::uint32_t) { return 0; }
  static __device__ __forceinline__ float scale_of(std::uint32_t) { return 1.0F; }
  static __device__ __forceinline__ std::uint32_t encode(float value, float) {
    return to_bfloat16(value);
  }
  static __device__ __forceinline__ float decode(std::uint32_t code, float) {
    return from_bfloat16(static_cast<std::uint16_t>(code));
  }
};

template <>
struct DeviceCodec<Codec::kFloat16> {
  static constexpr int kCodeBytes = 2;
  static __device__ __forceinline__ std::uint32_t counted(std::uint32_t magnitude) {
    return magnitude < kInfinityBits ? magnitude : 0U;
  }
  static __device__ __forceinline__ float scale_of(std::uint32_t largest) {
    return GuardedHalf::scale_of(GuardedHalf::exponent_of(largest));
  }
  // The device's own conversion has another NaN.
  static __device__ __forceinline__ std::uint32_t encode(float value, float scale) {
    const std::uint32_t exponent = (bits_of(scale) >> 23U) - 127U;
    const float scaled = GuardedHalf::scaled(value, GuardedHalf::inverse_of(exponent));
    return scaled != scaled ? 0x7E00U : to_float16(scaled);
  }
  static __device__ __forceinline__ float decode(std::uint32_t code, float scale) {
    return from_float16(static_cast<std::uint16_t>(code)) * scale;
  }
};

template <>
struct DeviceCodec<Codec::kInt8> {
  static constexpr int kCodeBytes = 1;
  static __device__ __forceinline__ std::uint32_t counted(std::uint32_t magnitude) {
    return magnitude;
  }
  static __device__ __forceinline__ float scale_of(std::uint32_t largest) {
    return ScaledInt8::scale_of(largest);
  }
  static __device__ __forceinline__ std::uint32_t encode(float value, float scale) {
    return ScaledInt8::is_number(scale) ? ScaledInt8::encode(value, scale) : 0U;
  }
  static __device__ __forceinline__ float decode(std::uint32_t code, float scale) {
    return ScaledInt8::decode(static_cast<std::uint8_t>(code), scale);
  }
};

template <Codec kCodec>
struct WireBlock {
  using Device = DeviceCodec<kCodec>;
  static constexpr int kCodeBytes = Device::kCodeBytes;
  static constexpr int kHeaderBytes = static_cast<int>(header_bytes(kCodec));
  static constexpr int kBytes = static_cast<int>(wire_block_bytes(kCodec, kCodecBlockElements));

  static __device__ __forceinline__ std::uint32_t* at(void* wire, const BlockPlace& place) {
    return reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(wire) +
                                            place.block * kBytes);
  }
  static __device__ __forceinline__ const std::uint32_t* at(const void* wire,
                                                            const BlockPlace& place) {
    return at(const_cast<void*>(wire), place);
  }
  // The words of a piece's codes: how many, padding included, and where they begin.
  static __device__ __forceinline__ int words_of(int count) { return (count * kCodeBytes + 3) / 4; }
  static __device__ __forceinline__ int first_word(int piece) {
    return (kHeaderBytes + BlockPlace::first_of(piece) * kCodeBytes) / 4;
  }

  static __device__ __forceinline__ float scale_of(const BlockValues<float>& values) {
    if constexpr (kHeaderBytes == 0) return 1.0F;
    std::int32_t largest = 0;
    TRADEWIND_UNROLL
    for (int i = 0; i < kPieces * kThreadElements; ++i) {
      const float value = values.pieces[i / kThreadElements][i % kThreadElements];
      const auto counted = static_cast<std::int32_t>(Device::counted(magnitude_of(value)));
      largest = largest > counted ? largest : counted;
    }
    return Device::scale_of(static_cast<std::uint32_t>(max_of_warp(largest)));
  }

  static __device__ __forceinline__ void put_scale(float scale, std::uint32_t* block) {
    if (kHeaderBytes > 0 && lane_of_thread() == 0) store_global(block, bits_of(scale));
  }
  static __device__ __forceinline__ float fetch_scale(const std::uint32_t* block) {
    if constexpr (kHeaderBytes == 0) return 1.0F;
    return float_of(load_global(block));
  }

  static __device__ __forceinline__ void put_codes(const Raw<float>& codes, int piece, int count,
                                                   std::uint32_t* block) {
    const int num_words = words_of(count);
    TRADEWIND_UNROLL
    for (int word = 0; word < kCodeBytes; ++word) {
      if (word < num_words) store_global(block + first_word(piece) + word, codes.words[word]);
    }
  }
  static __device__ __forceinline__ void fetch_codes(const std::uint32_t* block, int piece,
                                                     int count, Raw<float>& codes) {
    const int num_words = words_of(count);
    TRADEWIND_UNROLL
    for (int word = 0; word < kCodeBytes; ++word) {
      codes.words[word] = word < num_words ? load_global(block + first_word(piece) + word) : 0U;
    }
  }

  // All of a part's block, decoded.
  static __device__ __forceinline__ void fetch(const void* wire, const BlockPlace& place,
                                               BlockValues<float>& values) {
    const std::uint32_t* block = at(wire, place);
    const float scale = fetch_scale(block);
    Raw<float> codes[kPieces];
    TRADEWIND_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      fetch_codes(block, piece, place.count_of(piece), codes[piece]);
    }
    TRADEWIND_UNROLL
    for (int i = 0; i < kPieces * kThreadElements; ++i) {
      const int piece = i / kThreadElements;
      const std::uint32_t code = element<kCodeBytes>(codes[piece], i % kThreadElements);
      values.pieces[piece][i % kThreadElements] = Device::decode(code, scale);
    }
  }
};

}  // namespace tradewind::cuda
