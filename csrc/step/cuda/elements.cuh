// A thread's part of a sweep: four neighbouring elements of a slot's arrays, loaded, stepped by a
// rule as the CPU's step_element() does, and stored.
#pragma once

#include "step/cuda/exponents.cuh"
#include "step/cuda/interface.h"
#include "step/cuda/parameter.cuh"
#include "step/rules/all.h"

namespace tradewind::cuda {

template <class Rule, class T, bool kFinishes>
struct SweepTraits {
  static constexpr bool kUsesGradient = !kFinishes;
  static constexpr bool kReadsStates = !kFinishes || Rule::kNeeds == Needs::kNorms;
  static constexpr bool kUsesDirection = Rule::kNeeds == Needs::kMatrix;
  static constexpr bool kWritesParameter = kFinishes || Rule::kNeeds == Needs::kElement;
  // Advancing a matrix changes nothing yet.
  static constexpr bool kHasChange = kFinishes || Rule::kNeeds != Needs::kMatrix;
  static constexpr int kNumStates = Rule::kNumStates;
  static constexpr int kStateRoom = kNumStates == 0 ? 1 : kNumStates;
};

// What all pieces of one norm block share.
template <class Rule, class T>
struct Bound {
  ParameterColumn<T> parameter;
  Column gradient;
  Column states[Rule::kNumStates == 0 ? 1 : Rule::kNumStates];
  Column direction;
  typename Rule::template Scalars<T> scalars;
  T multiplier;
  T scale;
  std::uint32_t random_key;
  bool is_random;
  bool has_exponents;
};

template <class Rule, class T, bool kFinishes>
__device__ __forceinline__ Bound<Rule, T> bind(const TradewindCudaTable& table, int slot_idx) {
  const TradewindCudaSlot& slot = table.slots[slot_idx];
  const TradewindCudaPlan& plan = table.plans[slot_idx];
  Bound<Rule, T> bound;
  bound.parameter = {{slot.parameter, nullptr, static_cast<Format>(slot.parameter_format)},
                     static_cast<Master>(slot.master_kind),
                     slot.master};
  bound.gradient = {slot.gradient, nullptr, static_cast<Format>(slot.gradient_format)};
  bound.direction = {slot.direction, nullptr,
                     sizeof(T) == sizeof(double) ? Format::kFloat64 : Format::kFloat32};
  bound.is_random = false;
  bound.has_exponents = false;
  for (int s = 0; s < Rule::kNumStates; ++s) {
    const auto format = static_cast<Format>(slot.state_formats[s]);
    bound.states[s] = {slot.states[s], slot.exponents[s], format};
    bound.is_random = bound.is_random || rounds_at_random(format);
    bound.has_exponents = bound.has_exponents || has_block_exponent(format);
  }
  memcpy(&bound.scalars, plan.scalars, sizeof(bound.scalars));
  bound.multiplier = static_cast<T>(plan.gradient_multiplier);
  bound.random_key = plan.random_key;
  double scale = slot.matrix_scale;
  if constexpr (kFinishes && Rule::kNeeds == Needs::kNorms) {
    const TradewindCudaChange& change = table.slot_changes[slot_idx];
    scale = Rule::scale(root(change.parameter_squares), root(change.change_squares));
  }
  bound.scale = static_cast<T>(scale);
  return bound;
}

// This thread's elements of a piece.
template <class Rule, class T, bool kFinishes>
struct Elements {
  using Traits = SweepTraits<Rule, T, kFinishes>;
  T before[kThreadElements];
  T updated[kThreadElements];
  T gradient[kThreadElements];
  T states[Traits::kStateRoom][kThreadElements];
  T direction[kThreadElements];

  // What moves: the parameter, or where a rule with norms advances, its direction.
  [[nodiscard]] __device__ __forceinline__ T change(int i) const {
    if constexpr (!kFinishes && Rule::kNeeds == Needs::kNorms) {
      return direction[i];
    } else {
      return updated[i] - before[i];
    }
  }

  __device__ __forceinline__ void load(const Bound<Rule, T>& bound, const Piece& piece) {
    typename ParameterColumn<T>::Fetched raw_parameter;
    Raw<T> raw_gradient;
    Raw<T> raw_states[Traits::kStateRoom];
    Raw<T> raw_direction;
    std::uint8_t exponents[Traits::kStateRoom];
    bound.parameter.fetch(piece, raw_parameter);
    if constexpr (Traits::kUsesGradient) bound.gradient.fetch(piece, raw_gradient);
    if constexpr (Traits::kReadsStates) {
      TRADEWIND_UNROLL
      for (int s = 0; s < Traits::kNumStates; ++s) {
        exponents[s] = bound.states[s].fetch_exponent(piece);
        bound.states[s].fetch(piece, raw_states[s]);
      }
    }
    if constexpr (Traits::kUsesDirection && kFinishes) bound.direction.fetch(piece, raw_direction);
    // From here on loads are waited for.
    bound.parameter.decode(raw_parameter, before);
    if constexpr (Traits::kUsesGradient) decode(bound.gradient.format, raw_gradient, 0, gradient);
    if constexpr (Traits::kReadsStates) {
      TRADEWIND_UNROLL
      for (int s = 0; s < Traits::kNumStates; ++s) {
        decode(bound.states[s].format, raw_states[s], exponents[s], states[s]);
      }
    }
    if constexpr (Traits::kUsesDirection && kFinishes) {
      decode(bound.direction.format, raw_direction, 0, direction);
    }
  }

  // As the CPU's step_element().
  __device__ __forceinline__ void step(const Bound<Rule, T>& bound, int i) {
    T own[Traits::kStateRoom] = {};
    for (int s = 0; s < Traits::kNumStates && Traits::kReadsStates; ++s) own[s] = states[s][i];
    updated[i] = before[i];
    if constexpr (kFinishes) {
      if constexpr (Rule::kNeeds == Needs::kNorms) {
        direction[i] = Rule::template direction<T>(bound.scalars, before[i], own);
      }
      Rule::template finish<T>(bound.scalars, bound.scale, direction[i], updated[i]);
    } else {
      const T scaled = gradient[i] * bound.multiplier;
      if constexpr (Rule::kNeeds == Needs::kElement) {
        Rule::template apply<T>(bound.scalars, scaled, updated[i], own);
      } else if constexpr (Rule::kNeeds == Needs::kNorms) {
        Rule::template advance<T>(bound.scalars, scaled, before[i], own);
        direction[i] = Rule::template direction<T>(bound.scalars, before[i], own);
      } else {
        direction[i] = Rule::template advance<T>(bound.scalars, scaled, before[i], own);
      }
      for (int s = 0; s < Traits::kNumStates; ++s) states[s][i] = own[s];
    }
  }

  __device__ __forceinline__ void find_maxima(const Bound<Rule, T>& bound, const Piece& piece,
                                              int pass, BlockMaxima& maxima) const {
    for (int s = 0; s < Traits::kNumStates; ++s) {
      if (has_block_exponent(bound.states[s].format)) maxima.add(pass, s, piece, states[s]);
    }
  }

  __device__ __forceinline__ void store(const Bound<Rule, T>& bound, const Piece& piece, int pass,
                                        const BlockMaxima& maxima) const {
    Rounding rounding{};
    if constexpr (Traits::kWritesParameter) bound.parameter.encode(piece, updated);
    if constexpr (Traits::kUsesDirection && !kFinishes) {
      encode(bound.direction, piece, direction, rounding);
    }
    if constexpr (!kFinishes) {
      if (bound.is_random) {
        TRADEWIND_UNROLL
        for (int i = 0; i < kThreadElements; ++i) {
          rounding.random[i] = random_bits(bound.random_key, piece.first + i);
        }
      }
      TRADEWIND_UNROLL
      for (int s = 0; s < Traits::kNumStates; ++s) {
        rounding.state = s;
        if (has_block_exponent(bound.states[s].format)) rounding.largest = maxima.largest(pass, s);
        encode(bound.states[s], piece, states[s], rounding);
      }
    }
  }
};

}  // namespace tradewind::cuda
