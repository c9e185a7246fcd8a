#include <algorithm>
#include <cmath>

#include "base/subnormals.h"
#include "step/blocks.h"
#include "step/lanes.h"
#include "step/sweep.h"

namespace tradewind {
namespace {

std::int64_t count_in_slot(const SweepSlot& slot, const Kernels& kernels) {
  const auto measure = kernels.measure[static_cast<int>(slot.gradient_dtype)];
  const std::int64_t bytes = element_bytes(slot.gradient_dtype);
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < slot.num_elements; ++i) {
    BlockMeasure element{};
    measure(advance_bytes(slot.gradient, i * bytes), 1, &element);
    count += std::isfinite(element.max_abs) ? 0 : 1;
  }
  return count;
}

}  // namespace

void Measure::begin(std::span<const SweepSlot> slots) {
  slots_ = slots;
  number_blocks(slots, first_block_);
  blocks_.resize(static_cast<std::size_t>(first_block_.back()));
  is_adopted_.assign(slots.size(), false);
}

void Measure::adopt(std::int64_t slot_idx, std::span<const BlockMeasure> blocks) {
  const auto idx = static_cast<std::size_t>(slot_idx);
  std::copy(blocks.begin(), blocks.end(), blocks_.begin() + first_block_[idx]);
  is_adopted_[idx] = true;
}

void Measure::run(const Kernels& kernels, const Parallel& parallel) {
  parallel.for_ranges(first_block_.back(), kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
    visit_blocks(first_block_, begin, end, slots_,
                 [&](std::size_t slot_idx, std::int64_t first, std::int64_t count) {
                   if (is_adopted_[slot_idx]) return;
                   const SweepSlot& slot = slots_[slot_idx];
                   const std::int64_t block = first_block_[slot_idx] + first / kNormBlockElements;
                   const std::int64_t offset = first * element_bytes(slot.gradient_dtype);
                   kernels.measure[static_cast<int>(slot.gradient_dtype)](
                       advance_bytes(slot.gradient, offset), count,
                       &blocks_[static_cast<std::size_t>(block)]);
                 });
  });
  combine();
  count_nonfinite(kernels);
}

void Measure::combine() {
  const KeepSubnormals keep_subnormals;
  slot_measures_.assign(slots_.size(), SlotMeasure{});
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    SlotMeasure& slot = slot_measures_[i];
    const BlockMeasure* blocks = blocks_.data() + first_block_[i];
    const std::int64_t count = first_block_[i + 1] - first_block_[i];
    slot.sum_of_squares =
        sum_in_lanes(count, [&](std::int64_t b) { return blocks[b].sum_of_squares; });
    for (std::int64_t b = 0; b < count; ++b) {
      // Written so that a NaN is taken, and stays.
      const bool is_larger = !(blocks[b].max_abs <= slot.max_abs);
      if (is_larger && !std::isnan(slot.max_abs)) slot.max_abs = blocks[b].max_abs;
      slot.num_zeros += blocks[b].num_zeros;
    }
  }
  sum_of_squares_ = sum_in_lanes(static_cast<std::int64_t>(slots_.size()), [&](std::int64_t i) {
    return slot_measures_[static_cast<std::size_t>(i)].sum_of_squares;
  });
}

void Measure::count_nonfinite(const Kernels& kernels) {
  num_nonfinite_ = 0;
  first_nonfinite_slot_ = -1;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (std::isfinite(slot_measures_[i].max_abs)) continue;
    num_nonfinite_ += count_in_slot(slots_[i], kernels);
    if (first_nonfinite_slot_ < 0) first_nonfinite_slot_ = static_cast<std::int64_t>(i);
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

}  // namespace tradewind
