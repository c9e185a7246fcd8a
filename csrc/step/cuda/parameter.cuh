// The parameter's array with its master: read from the master where there is one, written to both.
#pragma once

#include "step/cuda/column.cuh"

namespace tradewind::cuda {

template <class T>
struct ParameterColumn {
  // Only float32 arithmetic has masters.
  static constexpr bool kHasMasters = sizeof(T) == sizeof(float);

  struct Fetched {
    Raw<T> raw;
    Raw<T> low;  // Master::kSplit
  };

  Column stored;
  Master master;
  void* master_data;

  [[nodiscard]] __device__ __forceinline__ Column whole_master() const {
    return {master_data, nullptr, Format::kFloat32};
  }
  [[nodiscard]] __device__ __forceinline__ Column low_master() const {
    return {master_data, nullptr, Format::kBFloat16};
  }

  __device__ __forceinline__ void fetch(const Piece& piece, Fetched& fetched) const {
    if (kHasMasters && master == Master::kFloat32) {
      whole_master().fetch(piece, fetched.raw);
      return;
    }
    stored.fetch(piece, fetched.raw);
    if (kHasMasters && master == Master::kSplit) low_master().fetch(piece, fetched.low);
  }

  __device__ __forceinline__ void decode(const Fetched& fetched,
                                         T (&values)[kThreadElements]) const {
    if (kHasMasters && master == Master::kSplit) {
      TRADEWIND_UNROLL
      for (int i = 0; i < kThreadElements; ++i) {
        const auto high = static_cast<std::uint16_t>(element<2>(fetched.raw, i));
        const auto low = static_cast<std::uint16_t>(element<2>(fetched.low, i));
        values[i] = static_cast<T>(join_float(high, low));
      }
      return;
    }
    const bool is_whole = kHasMasters && master == Master::kFloat32;
    cuda::decode(is_whole ? Format::kFloat32 : stored.format, fetched.raw, 0, values);
  }

  __device__ __forceinline__ void encode(const Piece& piece,
                                         const T (&values)[kThreadElements]) const {
    if (kHasMasters && master == Master::kSplit) {
      Raw<T> high;
      Raw<T> low;
      TRADEWIND_UNROLL
      for (int i = 0; i < kThreadElements; ++i) {
        const SplitFloat split = split_float(static_cast<float>(values[i]));
        set_element<2>(high, i, split.high);
        set_element<2>(low, i, split.low);
      }
      stored.put(piece, high);
      low_master().put(piece, low);
      return;
    }
    const Rounding none{};
    if (kHasMasters && master == Master::kFloat32) {
      cuda::encode(whole_master(), piece, values, none);
    }
    cuda::encode(stored, piece, values, none);
  }
};

}  // namespace tradewind::cuda
