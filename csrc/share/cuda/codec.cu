// Values to wire bytes and back, one warp for each codec block.
#include "share/cuda/choose.cuh"
#include "share/cuda/wire.cuh"

namespace tradewind::cuda {
namespace {

template <Codec kCodec, class Values>
__global__ void __launch_bounds__(kShareThreads)
    encode_kernel(const void* values, std::int64_t num_elements, float* error, void* wire) {
  using Wire = WireBlock<kCodec>;
  using Device = DeviceCodec<kCodec>;
  const BlockPlace place = place_of_warp(num_elements);
  if (place.num_elements == 0) return;
  BlockRaw<float> raw;
  BlockRaw<float> kept;
  fetch_values<Values>(values, place, raw);
  if (error != nullptr) fetch_values<Float32Values>(error, place, kept);
  BlockValues<float> block;
  TRADEWIND_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    TRADEWIND_UNROLL
    for (int i = 0; i < kThreadElements; ++i) {
      const float value = value_in<Values>(raw.pieces[piece], i);
      block.pieces[piece][i] =
          error == nullptr ? value : value + value_in<Float32Values>(kept.pieces[piece], i);
    }
  }
  const float scale = Wire::scale_of(block);
  std::uint32_t* to = Wire::at(wire, place);
  Wire::put_scale(scale, to);
  TRADEWIND_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const int count = place.count_of(piece);
    Raw<float> codes;
    TRADEWIND_UNROLL
    for (int i = 0; i < kThreadElements; ++i) {
      const float value = block.pieces[piece][i];
      const std::uint32_t code = i < count ? Device::encode(value, scale) : 0U;
      set_element<Device::kCodeBytes>(codes, i, code);
      block.pieces[piece][i] = lost(value, Device::decode(code, scale));
    }
    Wire::put_codes(codes, piece, count, to);
  }
  if (error != nullptr) put_values<Float32Values>(block, place, error);
}

template <Codec kCodec, class Values>
__global__ void __launch_bounds__(kShareThreads)
    decode_kernel(const void* wire, std::int64_t num_elements, void* values) {
  const BlockPlace place = place_of_warp(num_elements);
  if (place.num_elements == 0) return;
  BlockValues<float> block;
  WireBlock<kCodec>::fetch(wire, place, block);
  put_values<Values>(block, place, values);
}

}  // namespace
}  // namespace tradewind::cuda

extern "C" int tradewind_cuda_share_version(void) { return TRADEWIND_CUDA_SHARE_VERSION; }

extern "C" int tradewind_cuda_encode(const TradewindCudaRun* run, const void* values, float* error,
                                     void* wire, void* stream) {
  using namespace tradewind::cuda;
  return with_lossy_codec(*run, [&](auto codec, auto dtype) {
    return launch(encode_kernel<decltype(codec)::kCodec, decltype(dtype)>,
                  num_thread_blocks(run->num_elements), kShareThreads, 0, stream, values,
                  run->num_elements, error, wire);
  });
}

extern "C" int tradewind_cuda_decode(const TradewindCudaRun* run, const void* wire, void* values,
                                     void* stream) {
  using namespace tradewind::cuda;
  return with_lossy_codec(*run, [&](auto codec, auto dtype) {
    return launch(decode_kernel<decltype(codec)::kCodec, decltype(dtype)>,
                  num_thread_blocks(run->num_elements), kShareThreads, 0, stream, wire,
                  run->num_elements, values);
  });
}
