// The four stored formats, converted by arithmetic on doubles: nothing here is shared with the
// kernels' conversions, which work on bits or by instruction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "arena/dtype.h"
#include "step/format.h"

namespace tradewind {

template <class T, DType kStoredDType>
struct NativeFormat {
  using Stored = T;
  using Compute = T;
  static constexpr DType kDType = kStoredDType;
  static Compute decode(Stored stored) { return stored; }
  static Stored encode(double value) { return static_cast<T>(value); }
};

// A sign bit, kExponentBits and kMantissaBits of IEEE 754's binary interchange form. Encoding
// rounds to nearest, ties to even; NaN becomes the quiet one without a payload, as torch's does.
template <int kExponentBits, int kMantissaBits, DType kStoredDType>
struct SixteenBitFormat {
  using Stored = std::uint16_t;
  using Compute = float;
  static constexpr DType kDType = kStoredDType;
  static constexpr int kAllOnes = (1 << kExponentBits) - 1;
  static constexpr int kMinExponent = 2 - (1 << (kExponentBits - 1));
  static constexpr int kInfinity = kAllOnes << kMantissaBits;
  static constexpr int kNaN = kInfinity + (1 << (kMantissaBits - 1));

  static Compute decode(Stored stored) {
    const int exponent = (stored >> kMantissaBits) & kAllOnes;
    const int mantissa = stored & ((1 << kMantissaBits) - 1);
    double magnitude = 0.0;
    if (exponent == kAllOnes) {
      magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                                : std::numeric_limits<double>::quiet_NaN();
    } else {
      const int hidden = exponent == 0 ? 0 : 1 << kMantissaBits;
      magnitude =
          std::ldexp(mantissa + hidden, std::max(exponent, 1) - 1 + kMinExponent - kMantissaBits);
    }
    return static_cast<float>((stored & 0x8000) != 0 ? -magnitude : magnitude);
  }

  static Stored encode(double value) {
    if (std::isnan(value)) return static_cast<Stored>(kNaN);
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    int bits = kInfinity;
    if (magnitude == 0.0) {
      bits = 0;
    } else if (std::isfinite(magnitude)) {
      const int exponent = std::max(std::ilogb(magnitude), kMinExponent);
      // nearbyint rounds ties to even; the hidden bit carries into the exponent's field.
      const double quanta = std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent));
      bits = std::min(((exponent - kMinExponent) << kMantissaBits) + static_cast<int>(quanta),
                      kInfinity);
    }
    return static_cast<Stored>(sign + bits);
  }
};

using Float32Format = NativeFormat<float, DType::kFloat32>;
using Float64Format = NativeFormat<double, DType::kFloat64>;
using BFloat16Format = SixteenBitFormat<8, 7, DType::kBFloat16>;
using Float16Format = SixteenBitFormat<5, 10, DType::kFloat16>;

// Calls visit.operator()<Type>() for the format of a floating dtype.
template <class Visit>
void visit_format(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kFloat32: return visit.template operator()<Float32Format>();
    case DType::kFloat64: return visit.template operator()<Float64Format>();
    case DType::kBFloat16: return visit.template operator()<BFloat16Format>();
    default: return visit.template operator()<Float16Format>();
  }
}

// The floating dtype whose values a format's arrays are sampled from.
constexpr DType sampled_dtype(Format format) {
  if (format == Format::kStochasticBFloat16) return DType::kBFloat16;
  return is_blockwise(format) ? DType::kFloat32 : static_cast<DType>(format);
}

// Equal bits, or both NaN: which of two NaNs' signs and payloads an addition keeps is left open by
// IEEE 754 and differs between orders of operands.
template <class Type>
bool same_value(typename Type::Stored a, typename Type::Stored b) {
  if (std::memcmp(&a, &b, sizeof(a)) == 0) return true;
  return std::isnan(Type::decode(a)) && std::isnan(Type::decode(b));
}

}  // namespace tradewind
