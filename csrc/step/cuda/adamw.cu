// The AdamW sweep on the GPU: the same rule functor as on the CPU, compiled without contraction and
// with IEEE division and root, so that both give the same bits.
#include <cuda_runtime.h>

#include <cstring>

#include "step/cuda/interface.h"
#include "step/rules/adamw.h"

namespace tradewind {
namespace {

constexpr int kThreads = 256;
// Elements that one block of threads takes: large enough to amortise its start, small enough to
// spread GPT-2's smallest matrices over the chip.
constexpr std::int64_t kChunkElements = 8192;

struct Tensors {
  TradewindCudaTensor items[TRADEWIND_CUDA_MAX_TENSORS];
  std::int64_t first_chunk[TRADEWIND_CUDA_MAX_TENSORS + 1];
  int count;
};

template <bool kAmsgrad>
__global__ void __launch_bounds__(kThreads) adamw_kernel(
    const __grid_constant__ Tensors tensors,
    const __grid_constant__ typename AdamWRule<kAmsgrad>::template Scalars<float> scalars,
    float multiplier, const float* device_multiplier) {
  const std::int64_t chunk = blockIdx.x;
  int index = 0;
  while (chunk >= tensors.first_chunk[index + 1]) ++index;
  const TradewindCudaTensor& tensor = tensors.items[index];
  const std::int64_t begin = (chunk - tensors.first_chunk[index]) * kChunkElements;
  const std::int64_t end =
      begin + kChunkElements < tensor.num_elements ? begin + kChunkElements : tensor.num_elements;
  if (device_multiplier != nullptr) multiplier *= *device_multiplier;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    constexpr int kNumStates = AdamWRule<kAmsgrad>::kNumStates;
    float states[kNumStates];
    for (int state = 0; state < kNumStates; ++state) states[state] = tensor.states[state][i];
    float parameter = tensor.parameter[i];
    AdamWRule<kAmsgrad>::template apply<float>(scalars, tensor.gradient[i] * multiplier, parameter,
                                               states);
    tensor.parameter[i] = parameter;
    for (int state = 0; state < kNumStates; ++state) tensor.states[state][i] = states[state];
  }
}

template <bool kAmsgrad>
cudaError_t launch(const Tensors& tensors, const void* scalars, float multiplier,
                   const float* device_multiplier, cudaStream_t stream) {
  typename AdamWRule<kAmsgrad>::template Scalars<float> typed;
  std::memcpy(&typed, scalars, sizeof(typed));
  const auto blocks = static_cast<unsigned>(tensors.first_chunk[tensors.count]);
  if (blocks == 0) return cudaSuccess;
  adamw_kernel<kAmsgrad>
      <<<blocks, kThreads, 0, stream>>>(tensors, typed, multiplier, device_multiplier);
  return cudaGetLastError();
}

}  // namespace
}  // namespace tradewind

extern "C" int tradewind_cuda_adamw(const TradewindCudaTensor* tensors, int num_tensors,
                                    const void* scalars, int amsgrad, float multiplier,
                                    const float* device_multiplier, void* stream) {
  using namespace tradewind;
  if (num_tensors < 0 || num_tensors > TRADEWIND_CUDA_MAX_TENSORS) return cudaErrorInvalidValue;
  Tensors table{};
  table.count = num_tensors;
  for (int i = 0; i < num_tensors; ++i) {
    table.items[i] = tensors[i];
    table.first_chunk[i + 1] =
        table.first_chunk[i] + (tensors[i].num_elements + kChunkElements - 1) / kChunkElements;
  }
  auto* const launch_rule = amsgrad != 0 ? &launch<true> : &launch<false>;
  return launch_rule(table, scalars, multiplier, device_multiplier,
                     static_cast<cudaStream_t>(stream));
}
