#include "step/sweep.h"

#include <cmath>

#include "arena/gate.h"
#include "base/error.h"
#include "base/subnormals.h"
#include "step/blocks.h"
#include "step/lanes.h"

namespace tradewind {
namespace {

const RuleInfo& rule_of(const SweepSlot& slot) {
  return rules()[static_cast<std::size_t>(slot.rule_idx)];
}

std::int64_t master_bytes(Master master) { return master == Master::kSplit ? 2 : 4; }

// How much of the row is swept at a time while a save holds memory back: all threads then follow
// what is being written, in its order, instead of each waiting somewhere else.
constexpr std::int64_t kGatedBlocks = 256;

// Until nobody needs the old values of what a kernel is about to write.
void wait_for_gate(const SweepRange& range) {
  const Gate& gate = memory_gate();
  if (gate.is_open()) return;
  const std::int64_t count = range.num_elements;
  gate.wait(range.parameter, count * format_bytes(range.parameter_format));
  if (range.master_data != nullptr) {
    gate.wait(range.master_data, count * master_bytes(range.master));
  }
  for (int s = 0; s < kMaxStates; ++s) {
    if (range.states[s] == nullptr) continue;
    gate.wait(range.states[s], count * format_bytes(range.state_formats[s]));
    if (range.exponents[s] != nullptr) gate.wait(range.exponents[s], num_exponent_blocks(count));
  }
}

// Elements [first, first + count) of a slot. `first` begins a norm block.
SweepRange range_of(const SweepSlot& slot, std::int64_t first, std::int64_t count) {
  SweepRange range{};
  range.parameter = advance_bytes(slot.parameter, first * element_bytes(slot.dtype));
  range.parameter_format = format_of(slot.dtype);
  range.master = slot.master;
  range.master_data = advance_bytes(slot.master_data, first * master_bytes(slot.master));
  range.gradient = advance_bytes(slot.gradient, first * element_bytes(slot.gradient_dtype));
  range.gradient_format = format_of(slot.gradient_dtype);
  for (int s = 0; s < kMaxStates; ++s) {
    range.state_formats[s] = slot.state_formats[s];
    range.states[s] = advance_bytes(slot.states[s], first * format_bytes(slot.state_formats[s]));
    range.exponents[s] =
        slot.exponents[s] == nullptr ? nullptr : slot.exponents[s] + first / kExponentBlockElements;
  }
  range.first_element = first;
  range.num_elements = count;
  range.random_key = slot.random_key;
  return range;
}

}  // namespace

struct Sweep::Call {
  std::span<const SweepSlot> slots;
  std::span<const ScalarBlock> scalars;
  const Options& options;
  const Kernels& kernels;
  const Parallel& parallel;

  [[nodiscard]] bool has(Needs needs) const {
    return std::any_of(slots.begin(), slots.end(),
                       [&](const SweepSlot& slot) { return rule_of(slot).needs == needs; });
  }
  // Fills what all ranges of a slot share, and runs its kernel.
  void run(const SweepSlot& slot, Phase phase, SweepRange& range) const {
    range.gradient_multiplier = options.gradient_multiplier * slot.sign;
    range.scalars = &scalars[static_cast<std::size_t>(slot.scalars_idx)];
    const int is_double = slot.dtype == DType::kFloat64 ? 1 : 0;
    wait_for_gate(range);
    kernels.sweep[slot.rule_idx][is_double][static_cast<int>(phase)](range);
  }
};

void Sweep::run(std::span<const SweepSlot> slots, std::span<const ScalarBlock> scalars,
                const Options& options, const Kernels& kernels, const Parallel& parallel) {
  const Call call{slots, scalars, options, kernels, parallel};
  const bool has_norms = call.has(Needs::kNorms);
  const bool has_matrices = call.has(Needs::kMatrix);
  if (has_matrices && options.transform == nullptr) {
    fail(ErrorKind::kBadState, "sweep: a rule needs whole matrices; expected a MatrixTransform");
  }
  number_blocks(slots, first_block_);
  if (options.wants_changes || has_norms) {
    block_changes_.resize(static_cast<std::size_t>(first_block_.back()));
  }
  run_phase(call, Phase::kUpdate, Needs::kElement);
  if (has_norms) {
    run_phase(call, Phase::kUpdate, Needs::kNorms);
    combine_changes(slots);
    compute_scales(slots);
    run_phase(call, Phase::kFinish, Needs::kNorms);
  }
  if (has_matrices) run_matrices(call, parallel);
  if (options.wants_changes) combine_changes(slots);
}

void Sweep::run_phase(const Call& call, Phase phase, Needs needs) {
  const bool wants_changes =
      call.options.wants_changes || (needs == Needs::kNorms && phase == Phase::kUpdate);
  const auto run_blocks = [&](std::int64_t begin, std::int64_t end) {
    visit_blocks(first_block_, begin, end, call.slots,
                 [&](std::size_t slot_idx, std::int64_t first, std::int64_t count) {
                   const SweepSlot& slot = call.slots[slot_idx];
                   if (rule_of(slot).needs != needs) return;
                   SweepRange range = range_of(slot, first, count);
                   if (phase == Phase::kFinish) range.scale = scales_[slot_idx];
                   const auto block = static_cast<std::size_t>(first_block_[slot_idx] +
                                                               first / kNormBlockElements);
                   range.changes = wants_changes ? &block_changes_[block] : nullptr;
                   call.run(slot, phase, range);
                 });
  };
  std::int64_t done = 0;
  while (done < first_block_.back()) {
    const std::int64_t rest = first_block_.back() - done;
    const std::int64_t count = memory_gate().is_open() ? rest : std::min(rest, kGatedBlocks);
    call.parallel.for_ranges(count, kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
      run_blocks(done + begin, done + end);
    });
    done += count;
  }
}

// One matrix after the other, so that there is one direction at a time.
void Sweep::run_matrices(const Call& call, const Parallel& parallel) {
  for (std::size_t i = 0; i < call.slots.size(); ++i) {
    const SweepSlot& slot = call.slots[i];
    if (rule_of(slot).needs != Needs::kMatrix) continue;
    // Of doubles, which are aligned for floats too.
    if (direction_.size() < static_cast<std::size_t>(slot.num_elements)) {
      direction_.resize(static_cast<std::size_t>(slot.num_elements));
    }
    const std::int64_t bytes = slot.dtype == DType::kFloat64 ? 8 : 4;
    for (const Phase phase : {Phase::kUpdate, Phase::kFinish}) {
      parallel.for_ranges(
          num_norm_blocks(slot.num_elements), kGrainBlocks,
          [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t first = begin * kNormBlockElements;
            const std::int64_t last = std::min(end * kNormBlockElements, slot.num_elements);
            SweepRange range = range_of(slot, first, last - first);
            range.direction = advance_bytes(static_cast<void*>(direction_.data()), first * bytes);
            range.scale = slot.matrix_scale;
            if (call.options.wants_changes && phase == Phase::kFinish) {
              range.changes = &block_changes_[static_cast<std::size_t>(first_block_[i] + begin)];
            }
            call.run(slot, phase, range);
          });
      if (phase == Phase::kUpdate) {
        (*call.options.transform)(static_cast<std::int64_t>(i), direction_.data());
      }
    }
  }
}

void Sweep::compute_scales(std::span<const SweepSlot> slots) {
  const KeepSubnormals keep_subnormals;
  scales_.resize(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const RuleInfo& rule = rule_of(slots[i]);
    if (rule.needs != Needs::kNorms) continue;
    scales_[i] = rule.scale(std::sqrt(slot_changes_[i].parameter_squares),
                            std::sqrt(slot_changes_[i].change_squares));
  }
}

void Sweep::combine_changes(std::span<const SweepSlot> slots) {
  const KeepSubnormals keep_subnormals;
  slot_changes_.resize(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const BlockChange* blocks = block_changes_.data() + first_block_[i];
    const std::int64_t count = first_block_[i + 1] - first_block_[i];
    slot_changes_[i] = {
        sum_in_lanes(count, [&](std::int64_t b) { return blocks[b].parameter_squares; }),
        sum_in_lanes(count, [&](std::int64_t b) { return blocks[b].change_squares; })};
  }
}

}  // namespace tradewind
