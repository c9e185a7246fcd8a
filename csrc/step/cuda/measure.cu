// What gradients are like, by norm block: one warp for each block, one lane of the sum for each
// thread. Accumulation into float32 gradients measures in the same pass.
#include "base/bfloat16.h"
#include "base/cuda/half.cuh"
#include "step/cuda/place.cuh"
#include "step/cuda/warp.cuh"
#include "step/format.h"

namespace tradewind::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
// Loads under way for each thread: what hides the memory's latency at 4 or 2 bytes each.
constexpr int kInFlight = 16;

__device__ __forceinline__ float value_of(float stored) { return stored; }
__device__ __forceinline__ double value_of(double stored) { return stored; }
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
__device__ __forceinline__ float value_of(BFloat16 stored) { return from_bfloat16(stored.bits); }
__device__ __forceinline__ float value_of(Float16 stored) { return from_float16(stored.bits); }

// One lane's share of a norm block's measure.
template <class Value>
struct LaneMeasure {
  double sum = 0.0;
  decltype(magnitude_bits(Value{})) largest = 0;
  int num_zeros = 0;

  __device__ __forceinline__ void add(Value value) {
    const auto wide = static_cast<double>(value);
    sum += wide * wide;
    const auto bits = magnitude_bits(value);
    largest = largest > bits ? largest : bits;
    num_zeros += bits == 0 ? 1 : 0;
  }

  __device__ __forceinline__ void write(TradewindCudaMeasure* out) const {
    const double whole_sum = halve_warp(sum);
    const double max_abs = magnitude_of(max_of_warp(largest));
    const int all_zeros = halve_warp(num_zeros);
    if (lane_of_thread() == 0) {
      store_global(out, TradewindCudaMeasure{whole_sum, max_abs, all_zeros});
    }
  }
};

template <class Stored>
__device__ __forceinline__ void measure_block(const void* values, const Place& place,
                                              TradewindCudaMeasure* out) {
  const Stored* block = static_cast<const Stored*>(values) + place.first_element;
  LaneMeasure<decltype(value_of(Stored{}))> lane;
  visit_lane<kInFlight>(
      place.num_elements, [&](std::int64_t i) { return load_global(block + i); },
      [&](std::int64_t, Stored stored) { lane.add(value_of(stored)); });
  lane.write(out);
}

__global__ void __launch_bounds__(kThreads)
    measure_kernel(TradewindCudaTable table, TradewindCudaList list) {
  const std::int64_t list_block = std::int64_t{blockIdx.x} * kWarps + warp_of_thread();
  if (list_block >= list.num_blocks) return;
  const Place place = find_place(table, list, list_block);
  const TradewindCudaSlot& slot = table.slots[place.slot_idx];
  TradewindCudaMeasure* out = table.block_measures + place.block;
  switch (static_cast<Format>(slot.gradient_format)) {
    case Format::kFloat64: measure_block<double>(slot.gradient, place, out); break;
    case Format::kBFloat16: measure_block<BFloat16>(slot.gradient, place, out); break;
    case Format::kFloat16: measure_block<Float16>(slot.gradient, place, out); break;
    default: measure_block<float>(slot.gradient, place, out); break;
  }
}

template <class Stored>
__device__ __forceinline__ void ingest_block(const void* values, void* gradient, const Place& place,
                                             bool overwrites, TradewindCudaMeasure* out) {
  struct Fetched {
    Stored source;
    float before;
  };
  const Stored* sources = static_cast<const Stored*>(values) + place.first_element;
  float* gradients = static_cast<float*>(gradient) + place.first_element;
  LaneMeasure<float> lane;
  visit_lane<kInFlight / 2>(
      place.num_elements,
      [&](std::int64_t i) {
        return Fetched{load_global(sources + i), overwrites ? 0.0F : load_global(gradients + i)};
      },
      [&](std::int64_t i, Fetched fetched) {
        const float source = value_of(fetched.source);
        const float sum = overwrites ? source : fetched.before + source;
        store_global(gradients + i, sum);
        lane.add(sum);
      });
  if (out != nullptr) lane.write(out);
}

__global__ void __launch_bounds__(kThreads)
    ingest_kernel(TradewindCudaTable table, TradewindCudaList list,
                  const TradewindCudaSource* sources, bool overwrites, bool measures) {
  const std::int64_t list_block = std::int64_t{blockIdx.x} * kWarps + warp_of_thread();
  if (list_block >= list.num_blocks) return;
  const Place place = find_place(table, list, list_block);
  void* gradient = table.slots[place.slot_idx].gradient;
  const TradewindCudaSource source = sources[place.entry_idx];
  TradewindCudaMeasure* out = measures ? table.block_measures + place.block : nullptr;
  switch (static_cast<Format>(source.format)) {
    case Format::kBFloat16:
      ingest_block<BFloat16>(source.values, gradient, place, overwrites, out);
      break;
    case Format::kFloat16:
      ingest_block<Float16>(source.values, gradient, place, overwrites, out);
      break;
    default: ingest_block<float>(source.values, gradient, place, overwrites, out); break;
  }
}

std::int64_t num_thread_blocks(const TradewindCudaList& list) {
  return (list.num_blocks + kWarps - 1) / kWarps;
}

}  // namespace
}  // namespace tradewind::cuda

extern "C" int tradewind_cuda_measure(const TradewindCudaTable* table,
                                      const TradewindCudaList* list, void* stream) {
  using namespace tradewind::cuda;
  const TradewindCudaList visited = list == nullptr ? whole_table(*table) : *list;
  return launch(measure_kernel, num_thread_blocks(visited), kThreads, 0, stream, *table, visited);
}

extern "C" int tradewind_cuda_ingest(const TradewindCudaTable* table, const TradewindCudaList* list,
                                     const TradewindCudaSource* sources, int overwrites,
                                     int measures, void* stream) {
  using namespace tradewind::cuda;
  const TradewindCudaList visited = list == nullptr ? whole_table(*table) : *list;
  return launch(ingest_kernel, num_thread_blocks(visited), kThreads, 0, stream, *table, visited,
                sources, overwrites != 0, measures != 0);
}
