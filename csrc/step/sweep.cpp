#include "step/sweep.h"

#include <algorithm>
#include <cmath>

#include "arena/layout.h"
#include "base/subnormals.h"

namespace tradewind {
namespace {

// Below this many blocks a thread costs more to wake than it saves (a parallel region takes some
// 5 microseconds, a block of AdamW about one).
constexpr std::int64_t kGrainBlocks = 16;

// Each slot's first block in the concatenation of all slots, and their number at the end.
void number_blocks(std::span<const SweepSlot> slots, std::vector<std::int64_t>& first_block) {
  first_block.assign(1, 0);
  first_block.reserve(slots.size() + 1);
  for (const SweepSlot& slot : slots) {
    first_block.push_back(first_block.back() + num_norm_blocks(slot.num_elements));
  }
}

// Visits the parts of slots that make up blocks [begin, end) of the concatenation of all slots.
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

std::int64_t count_in_slot(const SweepSlot& slot, const Kernels& kernels) {
  const auto measure = kernels.measure[static_cast<int>(slot.dtype)];
  const std::int64_t bytes = element_bytes(slot.dtype);
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < slot.num_elements; ++i) {
    double square = 0.0;
    measure(advance_bytes(slot.gradient, i * bytes), 1, &square);
    // A finite float64 may square to infinity: ask its root instead.
    if (slot.dtype == DType::kFloat64) square = static_cast<const double*>(slot.gradient)[i];
    count += std::isfinite(square) ? 0 : 1;
  }
  return count;
}

}  // namespace

void Measure::begin(std::span<const SweepSlot> slots) {
  slots_ = slots;
  number_blocks(slots, first_block_);
  block_sums_.resize(static_cast<std::size_t>(first_block_.back()));
  is_adopted_.assign(slots.size(), false);
}

void Measure::adopt(std::int64_t slot_idx, std::span<const double> block_sums) {
  const auto idx = static_cast<std::size_t>(slot_idx);
  std::copy(block_sums.begin(), block_sums.end(), block_sums_.begin() + first_block_[idx]);
  is_adopted_[idx] = true;
}

void Measure::run(const Kernels& kernels, const Parallel& parallel) {
  parallel.for_ranges(first_block_.back(), kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
    visit_blocks(first_block_, begin, end, slots_,
                 [&](std::size_t slot_idx, std::int64_t first, std::int64_t count) {
                   if (is_adopted_[slot_idx]) return;
                   const SweepSlot& slot = slots_[slot_idx];
                   const std::int64_t block = first_block_[slot_idx] + first / kNormBlockElements;
                   kernels.measure[static_cast<int>(slot.dtype)](
                       advance_bytes(slot.gradient, first * element_bytes(slot.dtype)), count,
                       &block_sums_[static_cast<std::size_t>(block)]);
                 });
  });
  combine();
  num_nonfinite_ = 0;
  first_nonfinite_slot_ = -1;
  if (std::isfinite(sum_of_squares_)) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (std::isfinite(slot_sums_[i])) continue;
    const std::int64_t count = count_in_slot(slots_[i], kernels);
    num_nonfinite_ += count;
    if (count > 0 && first_nonfinite_slot_ < 0) {
      first_nonfinite_slot_ = static_cast<std::int64_t>(i);
    }
  }
}

void Measure::combine() {
  const KeepSubnormals keep_subnormals;
  slot_sums_.assign(slots_.size(), 0.0);
  sum_of_squares_ = 0.0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    for (std::int64_t block = first_block_[i]; block < first_block_[i + 1]; ++block) {
      slot_sums_[i] += block_sums_[static_cast<std::size_t>(block)];
    }
    sum_of_squares_ += slot_sums_[i];
  }
}

double Measure::norm() const {
  const KeepSubnormals keep_subnormals;
  return root(sum_of_squares_);
}

double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1.0 ? 1.0 : factor;
}

void sweep(std::span<const SweepSlot> slots, std::span<const ScalarBlock> scalars,
           double gradient_multiplier, const Kernels& kernels, const Parallel& parallel) {
  std::vector<std::int64_t> first_block;
  number_blocks(slots, first_block);
  parallel.for_ranges(first_block.back(), kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
    visit_blocks(first_block, begin, end, slots,
                 [&](std::size_t slot_idx, std::int64_t first, std::int64_t count) {
                   const SweepSlot& slot = slots[slot_idx];
                   const std::int64_t offset = first * element_bytes(slot.dtype);
                   SweepRange range{advance_bytes(slot.parameter, offset),
                                    advance_bytes(slot.gradient, offset),
                                    {},
                                    count,
                                    gradient_multiplier * slot.sign,
                                    &scalars[static_cast<std::size_t>(slot.scalars_idx)]};
                   for (int i = 0; i < kMaxStates; ++i) {
                     range.states[i] = advance_bytes(slot.states[i], offset);
                   }
                   kernels.sweep[slot.rule_idx][static_cast<int>(slot.dtype)](range);
                 });
  });
}

}  // namespace tradewind
