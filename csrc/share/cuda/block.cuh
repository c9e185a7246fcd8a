// A codec's block in the registers of a warp: four pieces of four neighbouring values in each
// thread, moved between memory and registers whole, so that the loads of all pieces are under way
// before the first is used.
#pragma once

#include "base/cuda/half.cuh"
#include "base/cuda/raw.cuh"
#include "share/codes.h"
#include "share/cuda/interface.h"

namespace tradewind::cuda {

inline constexpr int kPieces = 4;
static_assert(kPieces * kWarpThreads * kThreadElements == kCodecBlockElements);

// Threads of a launch, and the blocks that they take.
inline constexpr int kShareThreads = 256;
inline constexpr int kShareWarps = kShareThreads / kWarpThreads;

inline std::int64_t num_thread_blocks(std::int64_t num_elements) {
  constexpr std::int64_t kElements = kShareWarps * kCodecBlockElements;
  return (num_elements + kElements - 1) / kElements;
}

// This warp's block of a run.
struct BlockPlace {
  std::int64_t block;
  std::int64_t first_element;
  int num_elements;  // none beyond the run's end

  // Of a piece, the first of this thread's elements, counted from the block's, and how many.
  __device__ __forceinline__ static int first_of(int piece) {
    return (piece * kWarpThreads + lane_of_thread()) * kThreadElements;
  }
  __device__ __forceinline__ int count_of(int piece) const {
    const int left = num_elements - first_of(piece);
    return left < 0 ? 0 : (left < kThreadElements ? left : kThreadElements);
  }
};

__device__ __forceinline__ BlockPlace place_of_warp(std::int64_t num_elements) {
  const std::int64_t block = std::int64_t{blockIdx.x} * kShareWarps + warp_of_thread();
  const std::int64_t first = block * kCodecBlockElements;
  const std::int64_t left = num_elements - first;
  return {
      block, first,
      static_cast<int>(left < 0 ? 0 : (left < kCodecBlockElements ? left : kCodecBlockElements))};
}

// --- values -------------------------------------------------------------------------------------

struct Float32Values {
  using Compute = float;
  static constexpr int kBytes = 4;
  static __device__ __forceinline__ float load(std::uint32_t bits) { return float_of(bits); }
  static __device__ __forceinline__ std::uint32_t store(float value) { return bits_of(value); }
};
struct BFloat16Values {
  using Compute = float;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float load(std::uint32_t bits) {
    return from_bfloat16(static_cast<std::uint16_t>(bits));
  }
  static __device__ __forceinline__ std::uint32_t store(float value) { return to_bfloat16(value); }
};
struct Float16Values {
  using Compute = float;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float load(std::uint32_t bits) {
    return from_float16(static_cast<std::uint16_t>(bits));
  }
  static __device__ __forceinline__ std::uint32_t store(float value) { return to_float16(value); }
};
struct Float64Values {
  using Compute = double;
  static constexpr int kBytes = 8;
};

template <class T>
struct BlockRaw {
  Raw<T> pieces[kPieces];
};
template <class T>
struct BlockValues {
  T pieces[kPieces][kThreadElements];
};

// Values beyond the block's end are zero.
template <class Values, class T = typename Values::Compute>
__device__ __forceinline__ void fetch_values(const void* values, const BlockPlace& place,
                                             BlockRaw<T>& raw) {
  TRADEWIND_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const void* address = static_cast<const unsigned char*>(values) +
                          (place.first_element + place.first_of(piece)) * Values::kBytes;
    const int count = place.count_of(piece);
    if constexpr (Values::kBytes == 8) {
      fetch_wide(address, count, raw.pieces[piece]);
    } else {
      fetch_narrow<Values::kBytes>(address, count, raw.pieces[piece]);
    }
  }
}

template <class Values, class T = typename Values::Compute>
__device__ __forceinline__ T value_in(const Raw<T>& raw, int i) {
  if constexpr (Values::kBytes == 8) {
    return wide_element(raw, i);
  } else {
    return Values::load(element<Values::kBytes>(raw, i));
  }
}

template <class Values, class T = typename Values::Compute>
__device__ __forceinline__ void put_values(const BlockValues<T>& block, const BlockPlace& place,
                                           void* values) {
  TRADEWIND_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    void* address = static_cast<unsigned char*>(values) +
                    (place.first_element + place.first_of(piece)) * Values::kBytes;
    Raw<T> raw;
    TRADEWIND_UNROLL
    for (int i = 0; i < kThreadElements; ++i) {
      const T value = block.pieces[piece][i];
      if constexpr (Values::kBytes == 8) {
        set_wide_element(raw, i, value);
      } else {
        set_element<Values::kBytes>(raw, i, Values::store(value));
      }
    }
    if constexpr (Values::kBytes == 8) {
      put_wide(address, place.count_of(piece), raw);
    } else {
      put_narrow<Values::kBytes>(address, place.count_of(piece), raw);
    }
  }
}

}  // namespace tradewind::cuda
