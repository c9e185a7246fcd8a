// Layout inputs for property tests: mixed dtypes, scalars, empty slots in all places, slots of less
// than one norm block up to many, and caps from one byte to more than everything.
#pragma once

#include <string>
#include <vector>

#include "arena/layout.h"
#include "base/split_mix.h"

namespace tradewind {

struct LayoutInput {
  std::vector<SlotSpec> specs;
  LayoutOptions options;
};

inline std::vector<std::int64_t> random_shape(SplitMix& random) {
  switch (random.below(6)) {
    case 0: return {};
    case 1: return {random.below(3), 0, 5};
    case 2: return {1 + random.below(100)};
    case 3: return {1 + random.below(64), 1 + random.below(300)};
    case 4: return {kNormBlockElements * (1 + random.below(3)) + random.below(3) - 1};
    default: return {2, 1 + random.below(5000), 3};
  }
}

inline LayoutInput random_layout_input(std::uint64_t seed) {
  SplitMix random(seed);
  LayoutInput input;
  const std::int64_t num_slots = random.below(40);
  for (std::int64_t i = 0; i < num_slots; ++i) {
    const auto dtype = static_cast<DType>(random.below(random.below(2) == 0 ? 2 : kNumDTypes));
    input.specs.push_back({"slot" + std::to_string(i), random_shape(random), dtype});
  }
  input.options.slot_alignment_bytes = std::int64_t{16} << random.below(5);
  input.options.arena_alignment_bytes = std::int64_t{4096} << random.below(3);
  input.options.bucket_bytes = std::int64_t{1} << random.below(22);
  return input;
}

inline constexpr std::uint64_t kNumRandomLayouts = 200;

}  // namespace tradewind
