// Sums of all ranks' parts in the order given, one warp for each codec block.
#include "share/cuda/choose.cuh"
#include "share/cuda/wire.cuh"

namespace tradewind::cuda {
namespace {

template <Codec kCodec, class Values, class T = typename Values::Compute>
__device__ __forceinline__ void fetch_part(const TradewindCudaPart& part, const BlockPlace& place,
                                           BlockValues<T>& values) {
  if constexpr (kCodec != Codec::kNone) {
    if (part.is_values == 0) {
      WireBlock<kCodec>::fetch(part.data, place, values);
      return;
    }
  }
  BlockRaw<T> raw;
  fetch_values<Values>(part.data, place, raw);
  TRADEWIND_UNROLL
  for (int i = 0; i < kPieces * kThreadElements; ++i) {
    const int piece = i / kThreadElements;
    values.pieces[piece][i % kThreadElements] =
        value_in<Values>(raw.pieces[piece], i % kThreadElements);
  }
}

template <Codec kCodec, class Values>
__global__ void __launch_bounds__(kShareThreads)
    sum_kernel(const TradewindCudaPart* parts, std::int64_t num_parts, std::int64_t num_elements,
               double divisor, void* values) {
  using T = typename Values::Compute;
  const BlockPlace place = place_of_warp(num_elements);
  if (place.num_elements == 0) return;
  // Every part of this thread's values is read before they are written: they may be one of them.
  BlockValues<T> total;
  fetch_part<kCodec, Values>(parts[0], place, total);
  for (std::int64_t p = 1; p < num_parts; ++p) {
    BlockValues<T> part;
    fetch_part<kCodec, Values>(parts[p], place, part);
    TRADEWIND_UNROLL
    for (int i = 0; i < kPieces * kThreadElements; ++i) {
      total.pieces[i / kThreadElements][i % kThreadElements] +=
          part.pieces[i / kThreadElements][i % kThreadElements];
    }
  }
  const auto divided_by = static_cast<T>(divisor);
  if (divided_by != T(1)) {
    TRADEWIND_UNROLL
    for (int i = 0; i < kPieces * kThreadElements; ++i) {
      total.pieces[i / kThreadElements][i % kThreadElements] /= divided_by;
    }
  }
  put_values<Values>(total, place, values);
}

}  // namespace
}  // namespace tradewind::cuda

extern "C" int tradewind_cuda_sum(const TradewindCudaRun* run, const TradewindCudaPart* parts,
                                  int64_t num_parts, double divisor, void* values, void* stream) {
  using namespace tradewind::cuda;
  return with_codec(*run, [&](auto codec, auto dtype) {
    return launch(sum_kernel<decltype(codec)::kCodec, decltype(dtype)>,
                  num_thread_blocks(run->num_elements), kShareThreads, 0, stream, parts, num_parts,
                  run->num_elements, divisor, values);
  });
}
