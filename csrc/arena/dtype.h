// Element types that an arena can hold. Arithmetic exists for the floating ones alone; the others
// (frozen integer parameters, say) only live in an arena.
#pragma once

#include <cstdint>
#include <string_view>

namespace tradewind {

enum class DType : std::uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kInt8,
  kUInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kComplex64,
  kComplex128,
};

inline constexpr int kNumDTypes = 12;
// The first ones of DType: those that the sweep and the measure are compiled for.
inline constexpr int kNumFloatingDTypes = 4;

constexpr bool is_floating(DType dtype) { return static_cast<int>(dtype) < kNumFloatingDTypes; }

constexpr bool is_complex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

constexpr std::int64_t element_bytes(DType dtype) {
  constexpr std::int64_t kBytes[kNumDTypes] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 8, 16};
  return kBytes[static_cast<int>(dtype)];
}

// torch's name of the type, without the "torch." prefix.
constexpr std::string_view dtype_name(DType dtype) {
  constexpr std::string_view kNames[kNumDTypes] = {"float32", "float64", "bfloat16",  "float16",
                                                   "int8",    "uint8",   "int16",     "int32",
                                                   "int64",   "bool",    "complex64", "complex128"};
  return kNames[static_cast<int>(dtype)];
}

}  // namespace tradewind
