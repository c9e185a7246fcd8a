// Bodies of the sharing kernels, included by one unit per ISA with TRADEWIND_ISA_NAMESPACE and
// TRADEWIND_ISA_NAME defined: plain scalar loops that the compiler vectorises, and no standard
// library functions, as in step/kernels_impl.h. All codecs work on one block of float32 in L1 at a
// time, so that codecs and dtypes add up instead of multiplying, and memory is walked once.
#include "arena/conversions_impl.h"
#include "base/subnormals.h"
#include "share/codes.h"
#include "share/kernels.h"
#include "share/low_rank_impl.h"

namespace tradewind::TRADEWIND_ISA_NAMESPACE {
namespace {

// --- blocks -----------------------------------------------------------------------------------

// Calls visit(first element, number of elements, bytes of wire before it) for each block of a run.
template <Codec kCodec, class Visit>
TRADEWIND_RULE void visit_blocks(std::int64_t num_elements, const Visit& visit) {
  constexpr std::int64_t kBytes = wire_block_bytes(kCodec, kCodecBlockElements);
  std::int64_t wire_offset = 0;
  for (std::int64_t first = 0; first < num_elements; first += kCodecBlockElements) {
    const std::int64_t left = num_elements - first;
    visit(first, left < kCodecBlockElements ? left : kCodecBlockElements, wire_offset);
    wire_offset += kBytes;
  }
}

// Of float16's scaling only finite values count: infinities stay what they are.
template <bool kFiniteOnly>
std::uint32_t largest_magnitude(const float* __restrict values, std::int64_t count) {
  // Signed: a vector maximum of these is in the baseline, and magnitudes have no sign.
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(magnitude_of(values[i]));
    const bool counts = !kFiniteOnly || magnitude < static_cast<std::int32_t>(kInfinityBits);
    const std::int32_t counted = counts ? magnitude : 0;
    largest = largest > counted ? largest : counted;
  }
  return static_cast<std::uint32_t>(largest);
}

TRADEWIND_RULE void write_header(float header, std::byte* wire) {
  __builtin_memcpy(wire, &header, sizeof(header));
}
TRADEWIND_RULE float read_header(const std::byte* wire) {
  float header = 0.0F;
  __builtin_memcpy(&header, wire, sizeof(header));
  return header;
}

// The bytes behind a block's codes, up to its end.
template <Codec kCodec>
TRADEWIND_RULE void write_padding(std::int64_t count, std::int64_t code_bytes, std::byte* wire) {
  const std::int64_t end = wire_block_bytes(kCodec, count);
  for (std::int64_t i = header_bytes(kCodec) + count * code_bytes; i < end; ++i) {
    wire[i] = std::byte{0};
  }
}

// --- codecs -----------------------------------------------------------------------------------
// Each encodes and decodes one block of at most kCodecBlockElements values.

template <Codec kCodec>
struct BlockCodec;

template <>
struct BlockCodec<Codec::kBfloat16> {
  static void encode(const float* values, std::int64_t count, std::byte* wire) {
    encode_as<float, BFloat16>(values, count, wire);
    write_padding<Codec::kBfloat16>(count, 2, wire);
  }
  static void decode(const std::byte* wire, std::int64_t count, float* values) {
    decode_as<float, BFloat16>(wire, count, values);
  }
};

template <>
struct BlockCodec<Codec::kFloat16> {
  static void encode(const float* __restrict values, std::int64_t count, std::byte* wire) {
    const std::uint32_t exponent = GuardedHalf::exponent_of(largest_magnitude<true>(values, count));
    const float inverse = GuardedHalf::inverse_of(exponent);
    alignas(64) float scaled[kCodecBlockElements];
    for (std::int64_t i = 0; i < count; ++i) scaled[i] = GuardedHalf::scaled(values[i], inverse);
    write_header(GuardedHalf::scale_of(exponent), wire);
    encode_as<float, Float16>(scaled, count, wire + header_bytes(Codec::kFloat16));
    write_padding<Codec::kFloat16>(count, 2, wire);
  }
  static void decode(const std::byte* wire, std::int64_t count, float* __restrict values) {
    const float scale = read_header(wire);
    decode_as<float, Float16>(wire + header_bytes(Codec::kFloat16), count, values);
    for (std::int64_t i = 0; i < count; ++i) values[i] *= scale;
  }
};

template <>
struct BlockCodec<Codec::kInt8> {
  static void encode(const float* __restrict values, std::int64_t count, std::byte* wire) {
    const float scale = ScaledInt8::scale_of(largest_magnitude<false>(values, count));
    write_header(scale, wire);
    auto* __restrict codes = reinterpret_cast<std::uint8_t*>(wire) + header_bytes(Codec::kInt8);
    if (ScaledInt8::is_number(scale)) {
      for (std::int64_t i = 0; i < count; ++i) codes[i] = ScaledInt8::encode(values[i], scale);
    } else {
      for (std::int64_t i = 0; i < count; ++i) codes[i] = 0;
    }
    write_padding<Codec::kInt8>(count, 1, wire);
  }
  static void decode(const std::byte* wire, std::int64_t count, float* __restrict values) {
    const float scale = read_header(wire);
    const auto* __restrict codes =
        reinterpret_cast<const std::uint8_t*>(wire) + header_bytes(Codec::kInt8);
    for (std::int64_t i = 0; i < count; ++i) values[i] = ScaledInt8::decode(codes[i], scale);
  }
};

// --- kernels ----------------------------------------------------------------------------------
// SAFETY: callers promise num_elements elements of Type behind `values`, as many floats behind
// `error` and wire_bytes() behind `wire`, which is aligned to 4.

template <class Type>
inline constexpr bool kIsFloat32 = false;
template <>
inline constexpr bool kIsFloat32<Float32> = true;

template <Codec kCodec, class Type>
void encode(const void* values, std::int64_t num_elements, float* error, std::byte* wire) {
  const KeepSubnormals keep_subnormals;
  const auto* typed = static_cast<const typename Type::Stored*>(values);
  alignas(64) float buffer[kCodecBlockElements];
  alignas(64) float decoded[kCodecBlockElements];
  const auto encode_block = [&](std::int64_t first, std::int64_t count, std::int64_t offset) {
    if constexpr (kIsFloat32<Type>) {
      if (error == nullptr) {
        BlockCodec<kCodec>::encode(typed + first, count, wire + offset);
        return;
      }
    }
    decode_as<float, Type>(typed + first, count, buffer);
    float* __restrict kept = error == nullptr ? nullptr : error + first;
    if (error != nullptr) {
      for (std::int64_t i = 0; i < count; ++i) buffer[i] += kept[i];
    }
    BlockCodec<kCodec>::encode(buffer, count, wire + offset);
    if (error != nullptr) {
      BlockCodec<kCodec>::decode(wire + offset, count, decoded);
      for (std::int64_t i = 0; i < count; ++i) kept[i] = lost(buffer[i], decoded[i]);
    }
  };
  visit_blocks<kCodec>(num_elements, encode_block);
}

template <Codec kCodec, class Type>
void decode(const std::byte* wire, std::int64_t num_elements, void* values) {
  const KeepSubnormals keep_subnormals;
  auto* typed = static_cast<typename Type::Stored*>(values);
  const auto decode_block = [&](std::int64_t first, std::int64_t count, std::int64_t offset) {
    if constexpr (kIsFloat32<Type>) {
      BlockCodec<kCodec>::decode(wire + offset, count, typed + first);
    } else {
      alignas(64) float buffer[kCodecBlockElements];
      BlockCodec<kCodec>::decode(wire + offset, count, buffer);
      encode_as<float, Type>(buffer, count, typed + first);
    }
  };
  visit_blocks<kCodec>(num_elements, decode_block);
}

// One block of a part as numbers to add: where it lies, or decoded into the buffer.
template <Codec kCodec, class Type, class T>
TRADEWIND_RULE const T* open_part(const SumPart& part, std::int64_t first, std::int64_t count,
                                  std::int64_t wire_offset, T* buffer) {
  if constexpr (kCodec != Codec::kNone) {
    if (!part.is_values) {
      BlockCodec<kCodec>::decode(static_cast<const std::byte*>(part.data) + wire_offset, count,
                                 buffer);
      return buffer;
    }
  }
  const auto* typed = static_cast<const typename Type::Stored*>(part.data) + first;
  if constexpr (sizeof(typename Type::Stored) == sizeof(T)) {
    return typed;
  } else {
    decode_as<T, Type>(typed, count, buffer);
    return buffer;
  }
}

// (a + b) / divisor, where `out` may be a or b.
template <class T>
void add_two(const T* a, const T* b, std::int64_t count, T divisor, T* out) {
  if (divisor == T(1)) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
  } else {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) out[i] = (a[i] + b[i]) / divisor;
  }
}

template <class T>
void add_to(T* __restrict sum, const T* __restrict values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sum[i] += values[i];
}

template <Codec kCodec, class Type>
void sum(const SumPart* parts, std::int64_t num_parts, std::int64_t num_elements, double divisor,
         void* values) {
  using T = typename Type::Compute;
  const KeepSubnormals keep_subnormals;
  auto* typed = static_cast<typename Type::Stored*>(values);
  const auto divided_by = static_cast<T>(divisor);
  // A block of every part is read before that of `values` is written, which may be one of them.
  constexpr bool kIsPlain = sizeof(typename Type::Stored) == sizeof(T);
  if constexpr (kCodec == Codec::kNone && kIsPlain) {
    if (num_parts == 2) {
      add_two(static_cast<const T*>(parts[0].data), static_cast<const T*>(parts[1].data),
              num_elements, divided_by, typed);
      return;
    }
  }
  alignas(64) T total[kCodecBlockElements];
  alignas(64) T buffer[kCodecBlockElements];
  const auto sum_block = [&](std::int64_t first, std::int64_t count, std::int64_t offset) {
    const T* opened = open_part<kCodec, Type>(parts[0], first, count, offset, total);
    if (opened != total) {
      __builtin_memcpy(total, opened, sizeof(T) * static_cast<std::size_t>(count));
    }
    for (std::int64_t p = 1; p < num_parts; ++p) {
      add_to(total, open_part<kCodec, Type>(parts[p], first, count, offset, buffer), count);
    }
    if (divided_by != T(1)) {
      for (std::int64_t i = 0; i < count; ++i) total[i] /= divided_by;
    }
    encode_as<T, Type>(total, count, typed + first);
  };
  visit_blocks<kCodec>(num_elements, sum_block);
}

// --- the table --------------------------------------------------------------------------------

template <Codec kCodec>
constexpr void fill_lossy(ShareKernels& table) {
  constexpr int kRow = static_cast<int>(kCodec);
  const auto fill = [&](DType dtype, EncodeKernel encodes, DecodeKernel decodes, SumKernel sums) {
    table.encode[kRow][static_cast<int>(dtype)] = encodes;
    table.decode[kRow][static_cast<int>(dtype)] = decodes;
    table.sum[kRow][static_cast<int>(dtype)] = sums;
  };
  fill(DType::kFloat32, &encode<kCodec, Float32>, &decode<kCodec, Float32>, &sum<kCodec, Float32>);
  fill(DType::kBFloat16, &encode<kCodec, BFloat16>, &decode<kCodec, BFloat16>,
       &sum<kCodec, BFloat16>);
  fill(DType::kFloat16, &encode<kCodec, Float16>, &decode<kCodec, Float16>, &sum<kCodec, Float16>);
}

constexpr ShareKernels make_share_kernels() {
  constexpr Codec kNone = Codec::kNone;
  ShareKernels table{
      TRADEWIND_ISA_NAME,
      {},
      {},
      {{&sum<kNone, Float32>, &sum<kNone, Float64>, &sum<kNone, BFloat16>, &sum<kNone, Float16>}},
      make_low_rank_kernels()};
  fill_lossy<Codec::kBfloat16>(table);
  fill_lossy<Codec::kFloat16>(table);
  fill_lossy<Codec::kInt8>(table);
  return table;
}

}  // namespace

extern const ShareKernels kShareKernels;
constexpr ShareKernels kShareKernels = make_share_kernels();

}  // namespace tradewind::TRADEWIND_ISA_NAMESPACE
