// The inner loops, compiled once per ISA and chosen at run time: the sweep (one pass that applies a
// rule) and the measure (what a gradient is like, by norm block). Same input, same bits on every
// ISA: fixed lanes, no contraction, denormals kept (docs/numbers.md). Kernels touch no global state
// but the calling thread's floating-point control register, which they restore.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/isa.h"
#include "step/format.h"
#include "step/rule.h"
#include "step/rule_table.h"

namespace tradewind {

// One contiguous run of elements of one parameter, beginning at a norm block. Pointers need only
// their element's alignment; the arrays must not overlap.
struct SweepRange {
  void* parameter;
  Format parameter_format;
  Master master;
  void* master_data;  // float32, or the low 16 bits
  const void* gradient;
  Format gradient_format;
  void* states[kMaxStates];
  Format state_formats[kMaxStates];
  std::uint8_t* exponents[kMaxStates];  // of the run's blocks, for 8-bit states
  // What a rule with Needs::kMatrix advances by: written by advance, read by finish. float32, or
  // float64 for float64 parameters.
  void* direction;
  std::int64_t first_element;  // within the parameter
  std::int64_t num_elements;
  double gradient_multiplier;   // unscale, clip and sign in one factor
  double scale;                 // finish: what the direction is multiplied by
  const ScalarBlock* scalars;   // of double for float64 parameters, of float otherwise
  std::uint32_t random_key;     // of this parameter and step, for formats that round at random
  struct BlockChange* changes;  // null, or one for each norm block of the run
};

// Sums over one norm block, in the precision of the arithmetic.
struct BlockChange {
  double parameter_squares;  // before the update
  double change_squares;     // of the change; of the direction where a rule advances
};

// What the measure says of one norm block.
struct BlockMeasure {
  // A sum of float32 or 16-bit values is finite exactly where all of its elements are: their
  // squares cannot overflow float64.
  double sum_of_squares;
  double max_abs;  // NaN and infinity count as larger than any number
  std::int64_t num_zeros;
};

// The whole of a rule with Needs::kElement is kUpdate. The others advance, and finish later.
enum class Phase : std::uint8_t { kUpdate, kFinish };

using SweepKernel = void (*)(const SweepRange& range);
// Writes num_norm_blocks(num_elements) results.
using MeasureKernel = void (*)(const void* values, std::int64_t num_elements, BlockMeasure* blocks);
// Adds values to `sum`, or overwrites it. With `blocks` (may be null) also measures the new sum.
using IngestKernel = void (*)(const void* values, std::int64_t num_elements, bool overwrites,
                              float* sum, BlockMeasure* blocks);

struct Kernels {
  std::string_view isa;
  // By rule index (null beyond the last), float64 or not, Phase (null where a rule has no second).
  SweepKernel sweep[kMaxRules][2][2];
  MeasureKernel measure[kNumFloatingDTypes];
  IngestKernel ingest[kNumFloatingDTypes];  // null for float64
};

// The kernels of this process: the best ISA of this processor, or TRADEWIND_ISA, read once.
// Throws Error(kBadValue) where TRADEWIND_ISA names one that is unknown or not supported here.
const Kernels& kernels();
// Takes the names of supported_isas().
const Kernels& kernels_for(std::string_view isa);

}  // namespace tradewind
