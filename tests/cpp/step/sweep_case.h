// A sweep over a SlotTable, and what it should make of one entry.
#pragma once

#include <vector>

#include "step/kernel_case.h"
#include "step/measure_reference.h"
#include "step/slot_table.h"

namespace tradewind {

// The table after one step. With `sweep`, its changes() are kept.
inline SlotTable swept(SlotTable table, double multiplier, const Kernels& kernels,
                       const Parallel& parallel, bool is_transforming = true,
                       Sweep* sweep = nullptr) {
  const std::vector<ScalarBlock> scalars = table.scalars();
  const MatrixTransform none = [](std::int64_t, void*) {};
  const MatrixTransform transform = is_transforming ? example_transform(table) : none;
  const std::vector<SweepSlot> slots = table.slots();
  Sweep own;
  (sweep == nullptr ? own : *sweep)
      .run(slots, scalars,
           {.gradient_multiplier = multiplier,
            .wants_changes = sweep != nullptr,
            .transform = &transform},
           kernels, parallel);
  return table;
}

// By the contract: norms from block sums, in lanes over the blocks.
inline double norm_of(const std::vector<double>& block_squares) {
  return std::sqrt(reference_lane_sum(block_squares));
}

// Both phases of one entry; the moves are those of the parameter.
inline Expected expected_entry(const SlotTable::Entry& entry, double multiplier) {
  Update update = entry.update;
  update.multiplier = multiplier * entry.sign;
  UpdateArrays before = entry.arrays;
  const bool is_matrix = update.rule().needs == Needs::kMatrix;
  if (is_matrix) {
    const Format format = entry.storage.is_double() ? Format::kFloat64 : Format::kFloat32;
    before.direction = encode_array(format, std::vector<double>(before.parameter.size()));
  }
  Expected expected = expected_update(entry.storage, update, Phase::kUpdate, before);
  if (update.rule().needs == Needs::kElement) return expected;
  if (is_matrix) {
    std::vector<double> direction = decode_array<double>(expected.arrays.direction);
    reverse_and_halve(direction.data(), static_cast<std::int64_t>(direction.size()));
    expected.arrays.direction = encode_array(expected.arrays.direction.format, direction);
  } else {
    update.scale =
        update.rule().scale(norm_of(expected.parameter_squares), norm_of(expected.change_squares));
  }
  expected = expected_update(entry.storage, update, Phase::kFinish, expected.arrays);
  expected.arrays.direction = {};
  return expected;
}

}  // namespace tradewind
