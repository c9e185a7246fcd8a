// The step over a table of parameters: measure all gradients, combine the norm, sweep. The table
// and everything it points to belong to the caller and must outlive the call. Call from the thread
// that owns the Parallel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/parallel.h"
#include "step/kernels.h"

namespace tradewind {

struct SweepSlot {
  DType dtype;  // a floating one
  void* parameter;
  const void* gradient;
  void* states[kMaxStates];
  std::int64_t num_elements;
  int rule_idx;
  double sign;               // -1 maximizes
  std::int64_t scalars_idx;  // into the scalars given to sweep()
};

// The measure of one set of gradients, as they lie in memory (not unscaled).
class Measure {
 public:
  // Starts anew for these slots. Sums of a slot's blocks are then either given (`adopt`, taken
  // while the gradient was hot) or computed by run().
  void begin(std::span<const SweepSlot> slots);
  void adopt(std::int64_t slot_idx, std::span<const double> block_sums);
  // Computes what was not adopted, then combines: blocks in order within each parameter, then
  // parameters in order. Not a bit depends on threads, ISA or on what was adopted.
  void run(const Kernels& kernels, const Parallel& parallel);

  [[nodiscard]] double sum_of_squares() const { return sum_of_squares_; }
  [[nodiscard]] double norm() const;
  // Per slot.
  [[nodiscard]] std::span<const double> slot_sums() const { return slot_sums_; }
  // Elements that are NaN or infinite, and the first slot that has one (-1: none).
  [[nodiscard]] std::int64_t num_nonfinite() const { return num_nonfinite_; }
  [[nodiscard]] std::int64_t first_nonfinite_slot() const { return first_nonfinite_slot_; }

 private:
  void combine();
  void count_nonfinite();

  std::span<const SweepSlot> slots_;
  std::vector<std::int64_t> first_block_;  // per slot, and the total at the end
  std::vector<double> block_sums_;
  std::vector<std::int64_t> pending_slots_;
  std::vector<bool> is_adopted_;
  std::vector<double> slot_sums_;
  double sum_of_squares_ = 0.0;
  std::int64_t num_nonfinite_ = 0;
  std::int64_t first_nonfinite_slot_ = -1;
};

// What torch.nn.utils.clip_grad_norm_ multiplies by: max_norm / (norm + 1e-6), at most 1; NaN stays
// NaN.
double clip_factor(double norm, double max_norm);

// Updates every slot in place. `scalars` holds one block for each scalars_idx.
void sweep(std::span<const SweepSlot> slots, std::span<const ScalarBlock> scalars,
           double gradient_multiplier, const Kernels& kernels, const Parallel& parallel);

}  // namespace tradewind
