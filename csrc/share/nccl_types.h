// How DTypes and means become NCCL's types and scalars. No state.
#pragma once

#include <bit>
#include <cstdint>

#include "arena/dtype.h"
#include "share/nccl_api.h"

namespace tradewind {

// What one element is sent as.
struct NcclType {
  nccl::DataType type;
  int num_values;  // of that type: complex numbers are pairs
  bool can_reduce;
};

constexpr NcclType nccl_type_of(DType dtype) {
  constexpr NcclType kTypes[kNumDTypes] = {
      {nccl::kFloat32, 1, true}, {nccl::kFloat64, 1, true}, {nccl::kBfloat16, 1, true},
      {nccl::kFloat16, 1, true}, {nccl::kInt8, 1, true},    {nccl::kUint8, 1, true},
      {nccl::kUint8, 2, false},  {nccl::kInt32, 1, true},   {nccl::kInt64, 1, true},
      {nccl::kUint8, 1, true},   {nccl::kFloat32, 2, true}, {nccl::kFloat64, 2, true}};
  return kTypes[static_cast<int>(dtype)];
}

// 1/N for RedOpCreatePreMulSum, which reads as many bytes as its type has.
union NcclScalar {
  double float64;
  float float32;
  std::uint16_t bits16;
};

// The largest group whose 1/N is a normal float16.
inline constexpr int kMostFloat16Ranks = 1 << 14;

// 1/N in a floating type, by way of float32 where it is smaller, each time to nearest even.
constexpr NcclScalar nccl_reciprocal(int num_ranks, nccl::DataType type) {
  const double exact = 1.0 / num_ranks;
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(exact));
  const auto rounded = [bits](int dropped) {
    const std::uint32_t is_odd = (bits >> dropped) & 1U;
    return (bits + (1U << (dropped - 1)) - 1U + is_odd) >> dropped;
  };
  switch (type) {
    case nccl::kFloat64: return {.float64 = exact};
    case nccl::kBfloat16: return {.bits16 = static_cast<std::uint16_t>(rounded(16))};
    case nccl::kFloat16:  // its exponents count from 15, float32's from 127
      return {.bits16 = static_cast<std::uint16_t>(rounded(13) - ((127U - 15U) << 10))};
    default: return {.float32 = static_cast<float>(exact)};
  }
}

}  // namespace tradewind
