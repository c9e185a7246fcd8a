// All slots of a step as one row of norm blocks, so that one parallel region serves them all,
// however small they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "arena/layout.h"
#include "step/sweep.h"

namespace tradewind {

// Below this many blocks a thread costs more to wake than it saves (a parallel region takes some
// 5 microseconds, a block of AdamW about one).
inline constexpr std::int64_t kGrainBlocks = 16;

// Each slot's first block in the row, and the number of all at the end.
inline void number_blocks(std::span<const SweepSlot> slots,
                          std::vector<std::int64_t>& first_block) {
  first_block.assign(1, 0);
  first_block.reserve(slots.size() + 1);
  for (const SweepSlot& slot : slots) {
    first_block.push_back(first_block.back() + num_norm_blocks(slot.num_elements));
  }
}

// Visits the parts of slots that make up blocks [begin, end) of the row.
// visit(slot_idx, first element, number of elements)
template <class Visit>
void visit_blocks(std::span<const std::int64_t> first_block, std::int64_t begin, std::int64_t end,
                  std::span<const SweepSlot> slots, const Visit& visit) {
  auto slot_idx = static_cast<std::size_t>(
      std::upper_bound(first_block.begin(), first_block.end(), begin) - first_block.begin() - 1);
  for (std::int64_t block = begin; block < end; ++slot_idx) {
    const std::int64_t last = std::min(end, first_block[slot_idx + 1]);
    if (last <= block) continue;
    const std::int64_t first_element = (block - first_block[slot_idx]) * kNormBlockElements;
    const std::int64_t end_element =
        std::min((last - first_block[slot_idx]) * kNormBlockElements, slots[slot_idx].num_elements);
    visit(slot_idx, first_element, end_element - first_element);
    block = last;
  }
}

template <class Pointer>
Pointer advance_bytes(Pointer pointer, std::int64_t bytes) {
  // SAFETY: callers stay within the slot's num_elements elements.
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte,
                                  std::byte>;
  return pointer == nullptr ? nullptr : static_cast<Byte*>(pointer) + bytes;
}

}  // namespace tradewind
