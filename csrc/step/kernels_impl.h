// Bodies of the kernels, included by one unit per ISA with TRADEWIND_ISA_NAMESPACE and
// TRADEWIND_ISA_NAME defined. The loops are plain scalar code that the compiler vectorises: that is
// what makes tails, ISAs and the oracle agree to the bit. No standard library functions here: the
// linker would keep one ISA's copy of an inline function for all.
//
// A rule is compiled for float and double arrays alone. Other formats are decoded into a buffer in
// L1 and encoded from it, a chunk at a time, so that rules and formats add up instead of
// multiplying; arrays that are float32 already are worked on where they lie.
#include "arena/conversions_impl.h"
#include "arena/layout.h"
#include "base/subnormals.h"
#include "step/kernels.h"
#include "step/lanes.h"
#include "step/rules/all.h"

namespace tradewind::TRADEWIND_ISA_NAMESPACE {
namespace {

// --- formats ----------------------------------------------------------------------------------

// Elements that are decoded at a time: a few such buffers fit L1 beside what streams through it.
constexpr std::int64_t kChunkElements = 512;
static_assert(kNormBlockElements % kChunkElements == 0);
static_assert(kChunkElements % kExponentBlockElements == 0 && kChunkElements % kLanes == 0);

template <class T, bool kHasSign>
void decode_blocks(const void* stored, const std::uint8_t* exponents, std::int64_t count,
                   T* __restrict out) {
  const auto* __restrict codes = static_cast<const std::uint8_t*>(stored);
  for (std::int64_t first = 0; first < count; first += kExponentBlockElements) {
    const std::uint8_t exponent = exponents[first / kExponentBlockElements];
    const std::int64_t left = count - first;
    const std::int64_t end =
        first + (left < kExponentBlockElements ? left : kExponentBlockElements);
    for (std::int64_t i = first; i < end; ++i) {
      out[i] = static_cast<T>(BlockFloat<kHasSign>::decode(codes[i], exponent));
    }
  }
}

template <class T, bool kHasSign>
void encode_blocks(const T* __restrict values, const std::uint32_t* __restrict random, int state,
                   std::int64_t count, void* stored, std::uint8_t* exponents) {
  using Block = BlockFloat<kHasSign>;
  auto* __restrict codes = static_cast<std::uint8_t*>(stored);
  for (std::int64_t first = 0; first < count; first += kExponentBlockElements) {
    const std::int64_t left = count - first;
    const std::int64_t end =
        first + (left < kExponentBlockElements ? left : kExponentBlockElements);
    std::uint32_t largest = 0;
    for (std::int64_t i = first; i < end; ++i) {
      const std::uint32_t bits = bits_of(static_cast<float>(values[i])) & 0x7FFFFFFFU;
      largest = largest > bits ? largest : bits;
    }
    const std::uint8_t exponent = Block::block_exponent(largest);
    exponents[first / kExponentBlockElements] = exponent;
    const typename Block::Scale scale = Block::scale_of(exponent);
    for (std::int64_t i = first; i < end; ++i) {
      codes[i] = Block::encode(static_cast<float>(values[i]), scale, random_half(random[i], state));
    }
  }
}

template <class T>
void encode_stochastic(const T* __restrict values, const std::uint32_t* __restrict random,
                       int state, std::int64_t count, void* stored) {
  auto* __restrict typed = static_cast<std::uint16_t*>(stored);
  for (std::int64_t i = 0; i < count; ++i) {
    typed[i] = to_bfloat16_stochastic(static_cast<float>(values[i]), random_half(random[i], state));
  }
}

// One array of a range: where its elements lie, or a buffer they are decoded into.
template <class T>
struct Array {
  std::byte* data;
  std::uint8_t* exponents;
  Format format;

  [[nodiscard]] TRADEWIND_RULE bool is_plain() const {
    return format == (sizeof(T) == sizeof(double) ? Format::kFloat64 : Format::kFloat32);
  }
  [[nodiscard]] TRADEWIND_RULE std::byte* at(std::int64_t offset) const {
    return data + offset * format_bytes(format);
  }

  [[nodiscard]] T* open(std::int64_t offset, std::int64_t count, T* buffer) const {
    if (is_plain()) return reinterpret_cast<T*>(at(offset));
    const void* stored = at(offset);
    switch (format) {
      case Format::kFloat32: decode_as<T, Float32>(stored, count, buffer); break;
      case Format::kFloat64: decode_as<T, Float64>(stored, count, buffer); break;
      case Format::kBFloat16:
      case Format::kStochasticBFloat16: decode_as<T, BFloat16>(stored, count, buffer); break;
      case Format::kFloat16: decode_as<T, Float16>(stored, count, buffer); break;
      case Format::kSigned8:
        decode_blocks<T, true>(stored, exponents + offset / kExponentBlockElements, count, buffer);
        break;
      case Format::kPositive8:
        decode_blocks<T, false>(stored, exponents + offset / kExponentBlockElements, count, buffer);
        break;
    }
    return buffer;
  }

  void close(std::int64_t offset, std::int64_t count, const T* buffer, const std::uint32_t* random,
             int state) const {
    if (is_plain()) return;
    void* stored = at(offset);
    switch (format) {
      case Format::kFloat32: encode_as<T, Float32>(buffer, count, stored); break;
      case Format::kFloat64: encode_as<T, Float64>(buffer, count, stored); break;
      case Format::kBFloat16: encode_as<T, BFloat16>(buffer, count, stored); break;
      case Format::kFloat16: encode_as<T, Float16>(buffer, count, stored); break;
      case Format::kStochasticBFloat16:
        encode_stochastic<T>(buffer, random, state, count, stored);
        break;
      case Format::kSigned8:
        encode_blocks<T, true>(buffer, random, state, count, stored,
                               exponents + offset / kExponentBlockElements);
        break;
      case Format::kPositive8:
        encode_blocks<T, false>(buffer, random, state, count, stored,
                                exponents + offset / kExponentBlockElements);
        break;
    }
  }
};

// A parameter is read from its master where it has one, and written to both.
template <class T>
struct ParameterArray {
  Array<T> stored;
  Master master;
  std::byte* master_data;

  [[nodiscard]] TRADEWIND_RULE bool is_plain() const {
    return master == Master::kNone && stored.is_plain();
  }

  [[nodiscard]] T* open(std::int64_t offset, std::int64_t count, T* buffer) const {
    if (master == Master::kNone) return stored.open(offset, count, buffer);
    if (master == Master::kFloat32) return reinterpret_cast<T*>(master_data) + offset;
    const auto* __restrict high = reinterpret_cast<const std::uint16_t*>(stored.at(offset));
    const auto* __restrict low = reinterpret_cast<const std::uint16_t*>(master_data) + offset;
    for (std::int64_t i = 0; i < count; ++i)
      buffer[i] = static_cast<T>(join_float(high[i], low[i]));
    return buffer;
  }

  void close(std::int64_t offset, std::int64_t count, const T* values) const {
    if (master != Master::kSplit) {
      stored.close(offset, count, values, nullptr, 0);
      return;
    }
    auto* __restrict high = reinterpret_cast<std::uint16_t*>(stored.at(offset));
    auto* __restrict low = reinterpret_cast<std::uint16_t*>(master_data) + offset;
    for (std::int64_t i = 0; i < count; ++i) {
      const SplitFloat split = split_float(static_cast<float>(values[i]));
      high[i] = split.high;
      low[i] = split.low;
    }
  }
};

// --- the sweep --------------------------------------------------------------------------------

template <class T>
struct Lanes {
  T parameter_squares[kLanes];
  T change_squares[kLanes];
};

// The arrays of one chunk. Those that a phase does not use are null.
template <class T>
struct Chunk {
  T* parameter;
  const T* gradient;
  T* states[kMaxStates];
  T* direction;
  std::int64_t count;
};

template <class Rule, class T>
struct Bound {
  typename Rule::template Scalars<T> scalars;
  T multiplier;
  T scale;
};

// Element i of a chunk in the given phase. Returns the change (or the direction) for the lanes.
template <class Rule, class T, Phase kPhase>
TRADEWIND_RULE T step_element(const Bound<Rule, T>& bound, T* __restrict parameter,
                              const T* __restrict gradient, T* __restrict state0,
                              T* __restrict state1, T* __restrict state2, T* __restrict direction,
                              std::int64_t i) {
  constexpr int kNumStates = Rule::kNumStates;
  T states[kNumStates == 0 ? 1 : kNumStates] = {};
  // Finishing a matrix needs its direction alone.
  constexpr bool kReadsStates = kPhase == Phase::kUpdate || Rule::kNeeds == Needs::kNorms;
  if constexpr (kReadsStates && kNumStates > 0) states[0] = state0[i];
  if constexpr (kReadsStates && kNumStates > 1) states[1] = state1[i];
  if constexpr (kReadsStates && kNumStates > 2) states[2] = state2[i];
  const T before = parameter[i];
  T updated = before;
  T change = T(0);
  if constexpr (kPhase == Phase::kFinish) {
    T along = T(0);
    if constexpr (Rule::kNeeds == Needs::kNorms) {
      along = Rule::template direction<T>(bound.scalars, before, states);
    } else {
      along = direction[i];
    }
    Rule::template finish<T>(bound.scalars, bound.scale, along, updated);
    change = updated - before;
    parameter[i] = updated;
    return change;
  } else {
    const T scaled = gradient[i] * bound.multiplier;
    if constexpr (Rule::kNeeds == Needs::kElement) {
      Rule::template apply<T>(bound.scalars, scaled, updated, states);
      change = updated - before;
      parameter[i] = updated;
    } else if constexpr (Rule::kNeeds == Needs::kNorms) {
      Rule::template advance<T>(bound.scalars, scaled, before, states);
      change = Rule::template direction<T>(bound.scalars, before, states);
    } else {
      direction[i] = Rule::template advance<T>(bound.scalars, scaled, before, states);
    }
    if constexpr (kNumStates > 0) state0[i] = states[0];
    if constexpr (kNumStates > 1) state1[i] = states[1];
    if constexpr (kNumStates > 2) state2[i] = states[2];
    return change;
  }
}

template <class Rule, class T, Phase kPhase, bool kSums>
void step_chunk(const Bound<Rule, T>& bound, const Chunk<T>& chunk, Lanes<T>* lanes) {
  T* __restrict parameter = chunk.parameter;
  const T* __restrict gradient = chunk.gradient;
  T* __restrict state0 = chunk.states[0];
  T* __restrict state1 = chunk.states[1];
  T* __restrict state2 = chunk.states[2];
  T* __restrict direction = chunk.direction;
  const std::int64_t count = chunk.count;
  if constexpr (!kSums) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) {
      step_element<Rule, T, kPhase>(bound, parameter, gradient, state0, state1, state2, direction,
                                    i);
    }
  } else {
    T* __restrict parameter_squares = lanes->parameter_squares;
    T* __restrict change_squares = lanes->change_squares;
    for (std::int64_t first = 0; first < count; first += kLanes) {
      const std::int64_t left = count - first;
      const std::int64_t width = left < kLanes ? left : kLanes;
#pragma GCC ivdep
      for (std::int64_t lane = 0; lane < width; ++lane) {
        const T before = parameter[first + lane];
        const T change = step_element<Rule, T, kPhase>(bound, parameter, gradient, state0, state1,
                                                       state2, direction, first + lane);
        parameter_squares[lane] += before * before;
        change_squares[lane] += change * change;
      }
    }
  }
}

template <class Rule, class T, Phase kPhase>
void sweep(const SweepRange& range) {
  constexpr bool kUsesGradient = kPhase == Phase::kUpdate;
  constexpr bool kUsesStates = kPhase == Phase::kUpdate || Rule::kNeeds == Needs::kNorms;
  constexpr bool kWritesParameter = kPhase == Phase::kFinish || Rule::kNeeds == Needs::kElement;
  const KeepSubnormals keep_subnormals;
  Bound<Rule, T> bound;
  __builtin_memcpy(&bound.scalars, range.scalars->bytes, sizeof(bound.scalars));
  bound.multiplier = static_cast<T>(range.gradient_multiplier);
  bound.scale = static_cast<T>(range.scale);
  // SAFETY: SweepRange promises num_elements elements behind each pointer and no overlap. The
  // gradient is only read.
  const ParameterArray<T> parameter{
      {static_cast<std::byte*>(range.parameter), nullptr, range.parameter_format},
      range.master,
      static_cast<std::byte*>(range.master_data)};
  const Array<T> gradient{static_cast<std::byte*>(const_cast<void*>(range.gradient)), nullptr,
                          range.gradient_format};
  Array<T> states[kMaxStates];
  bool is_plain = parameter.is_plain() && (!kUsesGradient || gradient.is_plain());
  bool is_random = false;
  for (int s = 0; s < Rule::kNumStates; ++s) {
    states[s] = {static_cast<std::byte*>(range.states[s]), range.exponents[s],
                 range.state_formats[s]};
    is_plain = is_plain && (!kUsesStates || states[s].is_plain());
    is_random = is_random || range.state_formats[s] >= Format::kStochasticBFloat16;
  }
  alignas(64) T buffers[2 + kMaxStates][kChunkElements];
  alignas(64) std::uint32_t random[kChunkElements];
  Lanes<T> lanes;
  const std::int64_t piece =
      is_plain ? (range.changes == nullptr ? range.num_elements : kNormBlockElements)
               : kChunkElements;
  for (std::int64_t offset = 0; offset < range.num_elements; offset += piece) {
    const std::int64_t left = range.num_elements - offset;
    Chunk<T> chunk{};
    chunk.count = left < piece ? left : piece;
    chunk.parameter = parameter.open(offset, chunk.count, buffers[0]);
    if constexpr (kUsesGradient) chunk.gradient = gradient.open(offset, chunk.count, buffers[1]);
    if constexpr (kUsesStates) {
      for (int s = 0; s < Rule::kNumStates; ++s) {
        chunk.states[s] = states[s].open(offset, chunk.count, buffers[2 + s]);
      }
    }
    if constexpr (Rule::kNeeds == Needs::kMatrix) {
      chunk.direction = static_cast<T*>(range.direction) + offset;
    }
    if (range.changes == nullptr) {
      step_chunk<Rule, T, kPhase, false>(bound, chunk, nullptr);
    } else {
      if (offset % kNormBlockElements == 0) lanes = Lanes<T>{};
      step_chunk<Rule, T, kPhase, true>(bound, chunk, &lanes);
      if ((offset + chunk.count) % kNormBlockElements == 0 || chunk.count == left) {
        range.changes[offset / kNormBlockElements] = {
            static_cast<double>(halve_lanes(lanes.parameter_squares)),
            static_cast<double>(halve_lanes(lanes.change_squares))};
      }
    }
    if constexpr (kWritesParameter) parameter.close(offset, chunk.count, chunk.parameter);
    if constexpr (kPhase == Phase::kUpdate) {
      if (is_random) {
        // A chunk begins at a multiple of its length, so the upper 32 bits are one for all of it.
        const std::int64_t first = range.first_element + offset;
        const std::uint32_t key = random_key_near(range.random_key, first);
        const auto low = static_cast<std::uint32_t>(first);
        const auto count = static_cast<std::uint32_t>(chunk.count);
        for (std::uint32_t i = 0; i < count; ++i) random[i] = mix_bits((low + i) ^ key);
      }
      for (int s = 0; s < Rule::kNumStates; ++s) {
        states[s].close(offset, chunk.count, chunk.states[s], random, s);
      }
    }
  }
}

// --- the measure ------------------------------------------------------------------------------
// float64 squares of float32 values are exact, so a fused multiply-add, where a compiler would emit
// one, could not change a bit.

#if defined(__AVX512F__)
inline constexpr int kVectorDoubles = 8;
#elif defined(__AVX__)
inline constexpr int kVectorDoubles = 4;
#else
inline constexpr int kVectorDoubles = 2;
#endif
inline constexpr int kNumVectors = kLanes / kVectorDoubles;
using DoubleVector = double __attribute__((vector_size(kVectorDoubles * 8)));

// Magnitudes as integers: in their order NaN comes after infinity, so one maximum finds both.
template <class Compute>
struct Magnitude;
template <>
struct Magnitude<float> {
  using Bits = std::int32_t;
  using ValueVector = float __attribute__((vector_size(kVectorDoubles * 4)));
  using BitsVector = Bits __attribute__((vector_size(kVectorDoubles * 4)));
  static constexpr Bits kMask = 0x7FFFFFFF;
};
template <>
struct Magnitude<double> {
  using Bits = std::int64_t;
  using ValueVector = DoubleVector;
  using BitsVector = Bits __attribute__((vector_size(kVectorDoubles * 8)));
  static constexpr Bits kMask = 0x7FFFFFFFFFFFFFFF;
};

template <class Type>
BlockMeasure measure_block(const typename Type::Stored* values, std::int64_t num_elements) {
  using Compute = typename Type::Compute;
  using Bits = typename Magnitude<Compute>::Bits;
  using BitsVector = typename Magnitude<Compute>::BitsVector;
  constexpr Bits kMask = Magnitude<Compute>::kMask;
  DoubleVector sums[kNumVectors] = {};
  BitsVector largest = {};
  BitsVector zeros = {};
  const std::int64_t whole = num_elements / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < kNumVectors; ++v) {
      typename Magnitude<Compute>::ValueVector loaded;
      for (int e = 0; e < kVectorDoubles; ++e) {
        loaded[e] = Type::load(values[i + v * kVectorDoubles + e]);
      }
      const DoubleVector wide = __builtin_convertvector(loaded, DoubleVector);
      sums[v] += wide * wide;
      BitsVector bits;
      __builtin_memcpy(&bits, &loaded, sizeof(bits));
      bits &= kMask;
      largest = largest > bits ? largest : bits;
      zeros -= bits == 0;
    }
  }
  double lanes[kLanes];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  Bits max_bits = 0;
  std::int64_t num_zeros = 0;
  for (int e = 0; e < kVectorDoubles; ++e) {
    max_bits = max_bits > largest[e] ? max_bits : largest[e];
    num_zeros += zeros[e];
  }
  for (std::int64_t i = whole; i < num_elements; ++i) {
    const Compute value = Type::load(values[i]);
    lanes[i - whole] += static_cast<double>(value) * static_cast<double>(value);
    Bits bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    bits &= kMask;
    max_bits = max_bits > bits ? max_bits : bits;
    num_zeros += bits == 0 ? 1 : 0;
  }
  Compute max_abs = 0;
  __builtin_memcpy(&max_abs, &max_bits, sizeof(max_abs));
  return {halve_lanes(lanes), static_cast<double>(max_abs), num_zeros};
}

// float16 goes through decode_as(), which converts several at a time.
template <class Type>
inline constexpr bool kIsDecodedFirst = false;
template <>
inline constexpr bool kIsDecodedFirst<Float16> = true;

template <class Type>
void measure(const void* values, std::int64_t num_elements, BlockMeasure* blocks) {
  const KeepSubnormals keep_subnormals;
  // SAFETY: the caller promises num_elements elements of Type behind `values`.
  const auto* typed = static_cast<const typename Type::Stored*>(values);
  for (std::int64_t begin = 0; begin < num_elements; begin += kNormBlockElements) {
    const std::int64_t left = num_elements - begin;
    const std::int64_t count = left < kNormBlockElements ? left : kNormBlockElements;
    if constexpr (kIsDecodedFirst<Type>) {
      alignas(64) float values_of_block[kNormBlockElements];
      decode_as<float, Type>(typed + begin, count, values_of_block);
      *blocks++ = measure_block<Float32>(values_of_block, count);
    } else {
      *blocks++ = measure_block<Type>(typed + begin, count);
    }
  }
}

template <class Type>
void ingest(const void* values, std::int64_t num_elements, bool overwrites, float* sum,
            BlockMeasure* blocks) {
  const KeepSubnormals keep_subnormals;
  const auto* typed = static_cast<const typename Type::Stored*>(values);
  for (std::int64_t begin = 0; begin < num_elements; begin += kNormBlockElements) {
    const std::int64_t left = num_elements - begin;
    const std::int64_t count = left < kNormBlockElements ? left : kNormBlockElements;
    float* __restrict to = sum + begin;
    const typename Type::Stored* __restrict from = typed + begin;
    if (overwrites) {
      decode_as<float, Type>(from, count, to);
    } else if constexpr (kIsDecodedFirst<Type>) {
      alignas(64) float values_of_block[kNormBlockElements];
      decode_as<float, Type>(from, count, values_of_block);
      for (std::int64_t i = 0; i < count; ++i) to[i] += values_of_block[i];
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i] += Type::load(from[i]);
    }
    if (blocks != nullptr) *blocks++ = measure_block<Float32>(to, count);
  }
}

// --- the table --------------------------------------------------------------------------------

template <class Rule, class T>
constexpr SweepKernel finish_kernel() {
  if constexpr (Rule::kNeeds == Needs::kElement) {
    return nullptr;
  } else {
    return &sweep<Rule, T, Phase::kFinish>;
  }
}

template <class... Rules>
constexpr Kernels make_kernels(RuleList<Rules...>) {
  static_assert(sizeof...(Rules) <= kMaxRules, "raise kMaxRules in step/rule_table.h");
  return {TRADEWIND_ISA_NAME,
          {{{&sweep<Rules, float, Phase::kUpdate>, finish_kernel<Rules, float>()},
            {&sweep<Rules, double, Phase::kUpdate>, finish_kernel<Rules, double>()}}...},
          {&measure<Float32>, &measure<Float64>, &measure<BFloat16>, &measure<Float16>},
          {&ingest<Float32>, nullptr, &ingest<BFloat16>, &ingest<Float16>}};
}

}  // namespace

extern const Kernels kKernels;
constexpr Kernels kKernels = make_kernels(AllRules{});

}  // namespace tradewind::TRADEWIND_ISA_NAMESPACE
