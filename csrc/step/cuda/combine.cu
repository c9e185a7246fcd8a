// Sums of blocks by slot, one warp for each slot, and of slots by one warp: all in the order of
// step/lanes.h, so that the result has the CPU's bits.
#include "step/cuda/place.cuh"
#include "step/cuda/warp.cuh"

namespace tradewind::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kInFlight = 8;

__device__ __forceinline__ std::int64_t warp_of_grid() {
  return std::int64_t{blockIdx.x} * kWarps + warp_of_thread();
}

__global__ void __launch_bounds__(kThreads) combine_slots_kernel(TradewindCudaTable table) {
  const std::int64_t slot_idx = warp_of_grid();
  if (slot_idx >= table.num_slots) return;
  const std::int64_t first_block = table.first_blocks[slot_idx];
  const TradewindCudaMeasure* blocks = table.block_measures + first_block;
  double sum = 0.0;
  std::int64_t largest = 0;
  std::int64_t num_zeros = 0;
  visit_lane<kInFlight>(
      table.first_blocks[slot_idx + 1] - first_block,
      [&](std::int64_t i) { return load_global(blocks + i); },
      [&](std::int64_t, const TradewindCudaMeasure& block) {
        sum += block.sum_of_squares;
        const std::int64_t bits = magnitude_bits(block.max_abs);
        largest = largest > bits ? largest : bits;
        num_zeros += block.num_zeros;
      });
  const double whole_sum = halve_warp(sum);
  const double max_abs = magnitude_of(max_of_warp(largest));
  const std::int64_t all_zeros = halve_warp(num_zeros);
  if (lane_of_thread() == 0) {
    store_global(table.slot_measures + slot_idx,
                 TradewindCudaMeasure{whole_sum, max_abs, all_zeros});
  }
}

__global__ void __launch_bounds__(kWarpThreads) combine_table_kernel(TradewindCudaTable table) {
  constexpr std::int64_t kNone = 0x7FFFFFFF;
  double sum = 0.0;
  std::int64_t num_nonfinite = 0;
  std::int64_t first_nonfinite = kNone;
  visit_lane<kInFlight>(
      table.num_slots, [&](std::int64_t i) { return load_global(table.slot_measures + i); },
      [&](std::int64_t i, const TradewindCudaMeasure& slot) {
        sum += slot.sum_of_squares;
        if (is_finite(slot.max_abs)) return;
        ++num_nonfinite;
        first_nonfinite = first_nonfinite < i ? first_nonfinite : i;
      });
  const double whole_sum = halve_warp(sum);
  const std::int64_t all_nonfinite = halve_warp(num_nonfinite);
  const std::int64_t first = kNone - max_of_warp(kNone - first_nonfinite);
  if (lane_of_thread() == 0) {
    TradewindCudaOutcome& outcome = table.control->outcome;
    outcome.sum_of_squares = whole_sum;
    outcome.num_nonfinite_slots = static_cast<double>(all_nonfinite);
    outcome.first_nonfinite_slot = first == kNone ? -1 : first;
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_changes_kernel(TradewindCudaTable table, TradewindCudaList list) {
  const std::int64_t entry_idx = warp_of_grid();
  if (entry_idx >= list.num_slots || table.control->outcome.vetoed != 0) return;
  const std::int64_t slot_idx = list.slot_idx == nullptr ? entry_idx : list.slot_idx[entry_idx];
  const std::int64_t first_block = table.first_blocks[slot_idx];
  const TradewindCudaChange* blocks = table.block_changes + first_block;
  TradewindCudaChange sums{};
  visit_lane<kInFlight>(
      table.first_blocks[slot_idx + 1] - first_block,
      [&](std::int64_t i) { return load_global(blocks + i); },
      [&](std::int64_t, const TradewindCudaChange& block) {
        sums.parameter_squares += block.parameter_squares;
        sums.change_squares += block.change_squares;
      });
  sums = {halve_warp(sums.parameter_squares), halve_warp(sums.change_squares)};
  if (lane_of_thread() == 0) store_global(table.slot_changes + slot_idx, sums);
}

std::int64_t num_thread_blocks(std::int64_t num_slots) { return (num_slots + kWarps - 1) / kWarps; }

}  // namespace
}  // namespace tradewind::cuda

extern "C" int tradewind_cuda_combine(const TradewindCudaTable* table, void* stream) {
  using namespace tradewind::cuda;
  const int code = launch(combine_slots_kernel, num_thread_blocks(table->num_slots), kThreads, 0,
                          stream, *table);
  if (code != cudaSuccess) return code;
  return launch(combine_table_kernel, 1, kWarpThreads, 0, stream, *table);
}

extern "C" int tradewind_cuda_combine_changes(const TradewindCudaTable* table,
                                              const TradewindCudaList* list, void* stream) {
  using namespace tradewind::cuda;
  const TradewindCudaList visited = list == nullptr ? whole_table(*table) : *list;
  return launch(combine_changes_kernel, num_thread_blocks(visited.num_slots), kThreads, 0, stream,
                *table, visited);
}
