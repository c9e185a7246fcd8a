// The two inner loops, compiled once per ISA and chosen at run time: the sweep (one pass that
// applies a rule) and the measure (sums of squares by norm block). Same input, same bits on every
// ISA: fixed lanes, no contraction, denormals kept (docs/numbers.md). Kernels touch no global state
// but the calling thread's floating-point control register, which they restore.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "arena/dtype.h"
#include "step/rule.h"
#include "step/rule_table.h"

namespace tradewind {

// One contiguous run of elements of one parameter. Pointers need only their element's alignment;
// the arrays must not overlap.
struct SweepRange {
  void* parameter;
  const void* gradient;
  void* states[kMaxStates];
  std::int64_t num_elements;
  double gradient_multiplier;  // unscale, clip and sign in one factor
  const ScalarBlock* scalars;  // of double for float64 parameters, of float otherwise
};

using SweepKernel = void (*)(const SweepRange& range);
// Writes num_norm_blocks(num_elements) sums in float64. A sum of float32 or 16-bit values is finite
// exactly where all of its elements are: their squares cannot overflow float64.
using MeasureKernel = void (*)(const void* values, std::int64_t num_elements, double* block_sums);

struct Kernels {
  std::string_view isa;
  SweepKernel sweep[kMaxRules][kNumFloatingDTypes];  // by rule index, null beyond the last
  MeasureKernel measure[kNumFloatingDTypes];
};

// The kernels of this process: the best ISA of this processor, or TRADEWIND_ISA, read once.
// Throws Error(kBadValue) where TRADEWIND_ISA names one that is unknown or not supported here.
const Kernels& kernels();
// Names that kernels_for() takes on this processor, slowest first.
std::vector<std::string_view> supported_isas();
const Kernels& kernels_for(std::string_view isa);

}  // namespace tradewind
