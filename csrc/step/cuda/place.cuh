// Which slot a norm block belongs to, for one launch over any number of tensors.
#pragma once

#include "base/cuda/device.cuh"
#include "step/cuda/interface.h"

namespace tradewind::cuda {

inline constexpr int kBlockElements = TRADEWIND_CUDA_BLOCK_ELEMENTS;

inline TradewindCudaList whole_table(const TradewindCudaTable& table) {
  return {nullptr, table.first_blocks, table.num_blocks, table.num_slots};
}

struct Place {
  int entry_idx;  // in the list
  int slot_idx;   // in the table
  std::int64_t first_element;
  int num_elements;
  std::int64_t block;  // in the table's row of blocks
};

// The last of `count` first blocks that is not beyond `block`. Called by whole warps: each round
// leaves a thirty-second part, so 1,000 slots take two.
__device__ __forceinline__ int find_entry(const std::int64_t* first_blocks, int count,
                                          std::int64_t block) {
  int begin = 0;
  int end = count;
  while (end - begin > 1) {
    const int stride = (end - begin + kWarpThreads - 1) / kWarpThreads;
    const int probe = begin + lane_of_thread() * stride;
    const bool is_before = probe < end && first_blocks[probe] <= block;
    const int num_before = __popc(__ballot_sync(kWholeWarp, is_before ? 1 : 0));
    const int next = begin + num_before * stride;
    begin = next - stride;
    end = next < end ? next : end;
  }
  return begin;
}

// Where the list's norm block `list_block` lies. Called by whole warps.
__device__ __forceinline__ Place find_place(const TradewindCudaTable& table,
                                            const TradewindCudaList& list,
                                            std::int64_t list_block) {
  Place place;
  place.entry_idx = find_entry(list.first_blocks, list.num_slots, list_block);
  place.slot_idx = list.slot_idx == nullptr ? place.entry_idx : list.slot_idx[place.entry_idx];
  const TradewindCudaSlot& slot = table.slots[place.slot_idx];
  const std::int64_t block = list_block - list.first_blocks[place.entry_idx];
  place.first_element = block * kBlockElements;
  const std::int64_t left = slot.num_elements - place.first_element;
  place.num_elements = static_cast<int>(left < kBlockElements ? left : kBlockElements);
  place.block = slot.first_block + block;
  return place;
}

}  // namespace tradewind::cuda
