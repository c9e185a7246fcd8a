// The stand-in's arithmetic: one element at a time, in long double, which holds every value of
// every type exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "share/nccl_api.h"
#include "step/format.h"

namespace nccl_standin {

using namespace tradewind;

inline std::size_t bytes_of(nccl::DataType type) {
  constexpr std::size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[type];
}

// 11 bits from 2^-24 on, exponents up to 15; finite values only, those too large become infinite.
inline float from_float16(std::uint16_t stored) {
  const int exponent = (stored >> 10) & 31;
  const int bits = (stored & 0x3ff) + (exponent > 0 ? 0x400 : 0);
  const float size = std::ldexp(static_cast<float>(bits), std::max(exponent, 1) - 25);
  return (stored & 0x8000) != 0 ? -size : size;
}

inline std::uint16_t to_float16(float value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  const int exponent = size < 0x1p-14F ? -14 : std::ilogb(size);
  const int bits = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  // A normal number's top bit counts as one more exponent; so does a carry.
  const int stored = ((exponent + 14) << 10) + bits;
  return static_cast<std::uint16_t>(sign | std::min(stored, 0x7c00));
}

template <class T>
T read_as(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline long double load(nccl::DataType type, const std::byte* from) {
  switch (type) {
    case nccl::kInt8: return read_as<std::int8_t>(from);
    case nccl::kUint8: return read_as<std::uint8_t>(from);
    case nccl::kInt32: return read_as<std::int32_t>(from);
    case nccl::kUint32: return read_as<std::uint32_t>(from);
    case nccl::kInt64: return static_cast<long double>(read_as<std::int64_t>(from));
    case nccl::kUint64: return static_cast<long double>(read_as<std::uint64_t>(from));
    case nccl::kFloat16: return from_float16(read_as<std::uint16_t>(from));
    case nccl::kFloat32: return read_as<float>(from);
    case nccl::kFloat64: return read_as<double>(from);
    case nccl::kBfloat16: return from_bfloat16(read_as<std::uint16_t>(from));
  }
  return 0;
}

template <class T>
void write_as(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

inline void store(nccl::DataType type, std::byte* to, long double value) {
  switch (type) {
    case nccl::kInt8: return write_as(to, static_cast<std::int8_t>(value));
    case nccl::kUint8: return write_as(to, static_cast<std::uint8_t>(value));
    case nccl::kInt32: return write_as(to, static_cast<std::int32_t>(value));
    case nccl::kUint32: return write_as(to, static_cast<std::uint32_t>(value));
    case nccl::kInt64: return write_as(to, static_cast<std::int64_t>(value));
    case nccl::kUint64: return write_as(to, static_cast<std::uint64_t>(value));
    case nccl::kFloat16: return write_as(to, to_float16(static_cast<float>(value)));
    case nccl::kFloat32: return write_as(to, static_cast<float>(value));
    case nccl::kFloat64: return write_as(to, static_cast<double>(value));
    case nccl::kBfloat16: return write_as(to, to_bfloat16(static_cast<float>(value)));
  }
}

// output = the reduction of the parts in their order. `scale` is of operations made by
// ncclRedOpCreatePreMulSum.
inline void reduce(const std::vector<std::vector<std::byte>>& parts, nccl::DataType type, int op,
                   long double scale, std::byte* output) {
  const std::size_t width = bytes_of(type);
  for (std::size_t at = 0; at < parts[0].size(); at += width) {
    long double result = op >= 5 ? load(type, &parts[0][at]) * scale : load(type, &parts[0][at]);
    for (std::size_t part = 1; part < parts.size(); ++part) {
      const long double value = load(type, &parts[part][at]);
      result =
          op == nccl::kMax ? std::max(result, value) : result + (op >= 5 ? value * scale : value);
    }
    if (op == nccl::kAvg) result /= static_cast<long double>(parts.size());
    store(type, output + at, result);
  }
}

}  // namespace nccl_standin
