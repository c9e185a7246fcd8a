// One pass that applies a rule: a block of threads takes a norm block, each thread four
// neighbouring elements at a time. Compiled per rule and arithmetic; formats are decoded at run
// time.
#pragma once

#include "step/cuda/change.cuh"
#include "step/cuda/elements.cuh"
#include "step/cuda/place.cuh"

namespace tradewind::cuda {

// Of threads per multiprocessor, at least: enough loads under way, for few spilled registers.
template <class T>
inline constexpr int kMinThreadBlocks = sizeof(T) == sizeof(float) ? 4 : 2;

template <class Rule, class T, bool kFinishes>
__global__ void __launch_bounds__(kSweepThreads, kMinThreadBlocks<T>)
    sweep_kernel(TradewindCudaTable table, TradewindCudaList list, int rule_idx,
                 bool wants_changes) {
  using Traits = SweepTraits<Rule, T, kFinishes>;
  // Loaded beside the place, not before it.
  const bool is_vetoed = table.control->outcome.vetoed != 0;
  const Place place = find_place(table, list, blockIdx.x);
  const TradewindCudaSlot& slot = table.slots[place.slot_idx];
  const bool is_double = static_cast<Format>(slot.parameter_format) == Format::kFloat64;
  if (is_vetoed) return;
  if (slot.rule_idx != rule_idx || is_double != (sizeof(T) == sizeof(double))) return;
  const Bound<Rule, T> bound = bind<Rule, T, kFinishes>(table, place.slot_idx);
  BlockMaxima maxima(shared_memory<unsigned char>());
  ChangeSums<T> sums(shared_memory<unsigned char>() + BlockMaxima::kSharedBytes);
  // The same for all threads of the block, as they wait for each other.
  const int num_passes = (place.num_elements + kPassElements - 1) / kPassElements;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int begin = pass * kPassElements + static_cast<int>(threadIdx.x) * kThreadElements;
    const int left = place.num_elements - begin;
    const int count = left < 0 ? 0 : (left < kThreadElements ? left : kThreadElements);
    const Piece piece{place.first_element + begin, count};
    Elements<Rule, T, kFinishes> elements;
    elements.load(bound, piece);
    TRADEWIND_UNROLL
    for (int i = 0; i < kThreadElements; ++i) elements.step(bound, i);
    if constexpr (Traits::kHasChange) {
      if (wants_changes) {
        sums.add(piece, elements.before, [&](int i) { return elements.change(i); });
      }
    }
    if constexpr (!kFinishes && Traits::kNumStates > 0) {
      if (bound.has_exponents) {
        elements.find_maxima(bound, piece, pass, maxima);
        __syncthreads();
      }
    }
    elements.store(bound, piece, pass, maxima);
  }
  if constexpr (Traits::kHasChange) {
    if (wants_changes) sums.write(table.block_changes + place.block);
  }
}

template <class T, class Rule>
int launch_sweep(const TradewindCudaTable& table, const TradewindCudaList& list, int rule_idx,
                 bool finishes, bool wants_changes, void* stream) {
  const int num_shared_bytes =
      BlockMaxima::kSharedBytes + (wants_changes ? ChangeSums<T>::kSharedBytes : 0);
  if (!finishes) {
    return launch(sweep_kernel<Rule, T, false>, list.num_blocks, kSweepThreads, num_shared_bytes,
                  stream, table, list, rule_idx, wants_changes);
  }
  if constexpr (Rule::kNeeds == Needs::kElement) {
    return cudaErrorInvalidValue;
  } else {
    return launch(sweep_kernel<Rule, T, true>, list.num_blocks, kSweepThreads, num_shared_bytes,
                  stream, table, list, rule_idx, wants_changes);
  }
}

template <class T, class... Rules>
int launch_sweep_among(RuleList<Rules...>, const TradewindCudaTable& table,
                       const TradewindCudaList& list, int rule_idx, bool finishes,
                       bool wants_changes, void* stream) {
  int code = cudaErrorInvalidValue;
  int idx = 0;
  ((idx++ == rule_idx
        ? static_cast<void>(
              code = launch_sweep<T, Rules>(table, list, rule_idx, finishes, wants_changes, stream))
        : void()),
   ...);
  return code;
}

}  // namespace tradewind::cuda
