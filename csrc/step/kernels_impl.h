// Bodies of the kernels, included by one unit per ISA with TRADEWIND_ISA_NAMESPACE and
// TRADEWIND_ISA_NAME defined. The loops are plain scalar code that the compiler vectorises: that is
// what makes tails, ISAs and the oracle agree to the bit. No standard library functions here: the
// linker would keep one ISA's copy of an inline function for all.
#include "arena/layout.h"
#include "base/subnormals.h"
#include "step/kernels.h"
#include "step/rules/all.h"

namespace tradewind::TRADEWIND_ISA_NAMESPACE {
namespace {

struct Float32 {
  using Stored = float;
  using Compute = float;
  static TRADEWIND_RULE float load(float stored) { return stored; }
  static TRADEWIND_RULE float store(float value) { return value; }
};

struct Float64 {
  using Stored = double;
  using Compute = double;
  static TRADEWIND_RULE double load(double stored) { return stored; }
  static TRADEWIND_RULE double store(double value) { return value; }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Compute = float;
  static TRADEWIND_RULE float load(std::uint16_t stored) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(stored) << 16U);
  }
  // Round to nearest even by integers, with torch's NaN (0x7FC0): AVX-512's own conversion flushes
  // subnormals.
  static TRADEWIND_RULE std::uint16_t store(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
    return static_cast<std::uint16_t>(value != value ? 0x7FC0U : rounded);
  }
};

struct Float16 {
  using Stored = _Float16;
  using Compute = float;
  static TRADEWIND_RULE float load(_Float16 stored) { return static_cast<float>(stored); }
  static TRADEWIND_RULE _Float16 store(float value) { return static_cast<_Float16>(value); }
};

template <class Rule, class Type>
void sweep(const SweepRange& range) {
  using Stored = typename Type::Stored;
  using Compute = typename Type::Compute;
  using Scalars = typename Rule::template Scalars<Compute>;
  constexpr int kNumStates = Rule::kNumStates;
  const KeepSubnormals keep_subnormals;
  Scalars scalars;
  __builtin_memcpy(&scalars, range.scalars->bytes, sizeof(scalars));
  const auto multiplier = static_cast<Compute>(range.gradient_multiplier);
  // SAFETY: SweepRange promises num_elements elements behind each pointer and no overlap.
  Stored* __restrict parameter = static_cast<Stored*>(range.parameter);
  const Stored* __restrict gradient = static_cast<const Stored*>(range.gradient);
  Stored* __restrict state0 = static_cast<Stored*>(range.states[0]);
  Stored* __restrict state1 = static_cast<Stored*>(range.states[1]);
  Stored* __restrict state2 = static_cast<Stored*>(range.states[2]);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < range.num_elements; ++i) {
    Compute states[kNumStates == 0 ? 1 : kNumStates] = {};
    if constexpr (kNumStates > 0) states[0] = Type::load(state0[i]);
    if constexpr (kNumStates > 1) states[1] = Type::load(state1[i]);
    if constexpr (kNumStates > 2) states[2] = Type::load(state2[i]);
    Compute updated = Type::load(parameter[i]);
    Rule::template apply<Compute>(scalars, Type::load(gradient[i]) * multiplier, updated, states);
    parameter[i] = Type::store(updated);
    if constexpr (kNumStates > 0) state0[i] = Type::store(states[0]);
    if constexpr (kNumStates > 1) state1[i] = Type::store(states[1]);
    if constexpr (kNumStates > 2) state2[i] = Type::store(states[2]);
  }
}

// Element i of a block adds to lane i mod 32; lanes are then halved five times. Both are part of
// the norm's contract. float64 squares of float32 values are exact, so a fused multiply-add, where
// a compiler would emit one, could not change a bit.
inline constexpr int kLanes = 32;

template <class Type>
TRADEWIND_RULE double lane_square(typename Type::Stored stored) {
  const auto value = static_cast<double>(Type::load(stored));
  return value * value;
}

TRADEWIND_RULE double halve_lanes(double (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

#if defined(__AVX512F__)
inline constexpr int kVectorDoubles = 8;
#elif defined(__AVX__)
inline constexpr int kVectorDoubles = 4;
#else
inline constexpr int kVectorDoubles = 2;
#endif
inline constexpr int kNumVectors = kLanes / kVectorDoubles;
using DoubleVector = double __attribute__((vector_size(kVectorDoubles * 8)));

template <class Type>
TRADEWIND_RULE DoubleVector load_vector(const typename Type::Stored* values) {
  typename Type::Compute loaded
      __attribute__((vector_size(kVectorDoubles * sizeof(typename Type::Compute))));
  for (int i = 0; i < kVectorDoubles; ++i) loaded[i] = Type::load(values[i]);
  return __builtin_convertvector(loaded, DoubleVector);
}

template <class Type>
double measure_block(const typename Type::Stored* values, std::int64_t num_elements) {
  DoubleVector sums[kNumVectors] = {};
  const std::int64_t whole = num_elements / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < kNumVectors; ++v) {
      const DoubleVector loaded = load_vector<Type>(values + i + v * kVectorDoubles);
      sums[v] += loaded * loaded;
    }
  }
  double lanes[kLanes];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  for (std::int64_t i = whole; i < num_elements; ++i) {
    lanes[i - whole] += lane_square<Type>(values[i]);
  }
  return halve_lanes(lanes);
}

template <class Type>
void measure(const void* values, std::int64_t num_elements, double* block_sums) {
  const KeepSubnormals keep_subnormals;
  // SAFETY: the caller promises num_elements elements of Type behind `values`.
  const auto* typed = static_cast<const typename Type::Stored*>(values);
  for (std::int64_t begin = 0; begin < num_elements; begin += kNormBlockElements) {
    const std::int64_t left = num_elements - begin;
    *block_sums++ =
        measure_block<Type>(typed + begin, left < kNormBlockElements ? left : kNormBlockElements);
  }
}

template <class... Rules>
constexpr Kernels make_kernels(RuleList<Rules...>) {
  static_assert(sizeof...(Rules) <= kMaxRules, "raise kMaxRules in step/rule_table.h");
  return {TRADEWIND_ISA_NAME,
          {{&sweep<Rules, Float32>, &sweep<Rules, Float64>, &sweep<Rules, BFloat16>,
            &sweep<Rules, Float16>}...},
          {&measure<Float32>, &measure<Float64>, &measure<BFloat16>, &measure<Float16>}};
}

}  // namespace

extern const Kernels kKernels;
constexpr Kernels kKernels = make_kernels(AllRules{});

}  // namespace tradewind::TRADEWIND_ISA_NAMESPACE
