// What every codec must put on the wire and read from it, value by value in float64: nothing here
// is shared with share/codes.h, which works on bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "share/codec.h"
#include "step/stored_formats.h"

namespace tradewind {

using Bytes = std::vector<std::byte>;

inline constexpr Codec kLossyCodecs[] = {Codec::kBfloat16, Codec::kFloat16, Codec::kInt8};
inline constexpr DType kLossyDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

class WireReference {
 public:
  explicit WireReference(Codec codec) : codec_(codec) {}

  [[nodiscard]] Bytes encode(const std::vector<float>& values) const {
    Bytes wire;
    for (std::size_t first = 0; first < values.size(); first += 512) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
      const auto count =
          static_cast<std::ptrdiff_t>(std::min<std::size_t>(512, values.size() - first));
      encode_block({begin, begin + count}, wire);
      while (wire.size() % 4 != 0) wire.push_back(std::byte{0});
    }
    return wire;
  }

  [[nodiscard]] std::vector<float> decode(const Bytes& wire, std::size_t num_elements) const {
    std::vector<float> values;
    std::size_t at = 0;
    while (values.size() < num_elements) {
      const std::size_t count = std::min<std::size_t>(512, num_elements - values.size());
      double scale = 1.0;
      if (codec_ != Codec::kBfloat16) scale = static_cast<double>(take<float>(wire, at));
      for (std::size_t i = 0; i < count; ++i) {
        values.push_back(static_cast<float>(take_code(wire, at) * scale));
      }
      at = (at + 3) / 4 * 4;
    }
    return values;
  }

 private:
  template <class T>
  static void put(T value, Bytes& wire) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    wire.insert(wire.end(), bytes, bytes + sizeof(value));
  }
  template <class T>
  static T take(const Bytes& wire, std::size_t& at) {
    T value;
    std::memcpy(&value, wire.data() + at, sizeof(value));
    at += sizeof(value);
    return value;
  }
  [[nodiscard]] double take_code(const Bytes& wire, std::size_t& at) const {
    switch (codec_) {
      case Codec::kBfloat16:
        return static_cast<double>(BFloat16Format::decode(take<std::uint16_t>(wire, at)));
      case Codec::kFloat16:
        return static_cast<double>(Float16Format::decode(take<std::uint16_t>(wire, at)));
      default: return take<std::int8_t>(wire, at);
    }
  }

  void encode_block(const std::vector<float>& values, Bytes& wire) const {
    switch (codec_) {
      case Codec::kBfloat16:
        for (const float value : values) put(BFloat16Format::encode(value), wire);
        break;
      case Codec::kFloat16: encode_float16(values, wire); break;
      default: encode_int8(values, wire); break;
    }
  }

  static void encode_float16(const std::vector<float>& values, Bytes& wire) {
    double largest = 0.0;
    for (const float value : values) {
      if (std::isfinite(value)) largest = std::max(largest, std::fabs(static_cast<double>(value)));
    }
    double scale = 1.0;
    while (Float16Format::encode(largest / scale) == Float16Format::kInfinity) scale *= 2.0;
    // 2^113 would decode to infinity what rounds up to 2^128.
    scale = std::min(scale, 0x1p112);
    put(static_cast<float>(scale), wire);
    for (const float value : values) {
      double scaled = static_cast<double>(value) / scale;
      if (std::isfinite(value)) scaled = std::clamp(scaled, -65504.0, 65504.0);
      put(Float16Format::encode(scaled), wire);
    }
  }

  static void encode_int8(const std::vector<float>& values, Bytes& wire) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    float largest = 0.0F;
    for (const float value : values) {
      largest = std::isnan(value) ? kInfinity : std::max(largest, std::fabs(value));
      if (largest == kInfinity) break;
    }
    if (largest == kInfinity) {
      put(std::numeric_limits<float>::quiet_NaN(), wire);
      wire.resize(wire.size() + values.size());
      return;
    }
    const auto scale = int8_scale(largest);
    put(scale, wire);
    for (const float value : values) {
      const auto quotient =
          static_cast<float>(static_cast<double>(value) / static_cast<double>(scale));
      put(static_cast<std::int8_t>(scale == 0.0F ? 0.0F : std::nearbyint(quotient)), wire);
    }
  }

  // The nearest float to a 127th, but such that the largest value is within 127 of it, and finite
  // when decoded.
  static float int8_scale(float largest) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const auto nearest = static_cast<float>(static_cast<double>(largest) / 127.0);
    const auto exact = 127.0 * static_cast<double>(nearest);
    if (!std::isfinite(static_cast<float>(exact))) return std::nextafter(nearest, 0.0F);
    const bool is_subnormal = nearest < std::numeric_limits<float>::min();
    const bool is_short = is_subnormal && static_cast<float>(exact) < largest;
    return is_short ? std::nextafter(nearest, kInfinity) : nearest;
  }

  Codec codec_;
};

}  // namespace tradewind
