// From the numbers of a run to the kernel that is compiled for them.
#pragma once

#include "share/cuda/block.cuh"

namespace tradewind::cuda {

template <Codec kTheCodec>
struct CodecTag {
  static constexpr Codec kCodec = kTheCodec;
};

// Calls `call` with the tag of the run's codec and its Values, or answers that it takes none such.
template <class Call>
int with_lossy_dtype(const TradewindCudaRun& run, const Call& call) {
  switch (static_cast<DType>(run.dtype)) {
    case DType::kFloat32: return call(Float32Values{});
    case DType::kBFloat16: return call(BFloat16Values{});
    case DType::kFloat16: return call(Float16Values{});
    default: return cudaErrorInvalidValue;
  }
}

template <class Call>
int with_lossy_codec(const TradewindCudaRun& run, const Call& call) {
  const auto with = [&](auto tag) {
    return with_lossy_dtype(run, [&](auto values) { return call(tag, values); });
  };
  switch (static_cast<Codec>(run.codec)) {
    case Codec::kBfloat16: return with(CodecTag<Codec::kBfloat16>{});
    case Codec::kFloat16: return with(CodecTag<Codec::kFloat16>{});
    case Codec::kInt8: return with(CodecTag<Codec::kInt8>{});
    default: return cudaErrorInvalidValue;
  }
}

template <class Call>
int with_codec(const TradewindCudaRun& run, const Call& call) {
  if (static_cast<Codec>(run.codec) != Codec::kNone) return with_lossy_codec(run, call);
  const CodecTag<Codec::kNone> none;
  if (static_cast<DType>(run.dtype) == DType::kFloat64) return call(none, Float64Values{});
  return with_lossy_dtype(run, [&](auto values) { return call(none, values); });
}

}  // namespace tradewind::cuda
