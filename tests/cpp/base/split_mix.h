// SplitMix64 (Steele, Lea and Flood, 2014): test values that are the same on every machine.
#pragma once

#include <cstdint>

namespace tradewind {

class SplitMix {
 public:
  explicit SplitMix(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31U);
  }

  // In [0, bound).
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }

  // In [-1, 1), in steps of 2^-52.
  double uniform() { return static_cast<double>(next() >> 11U) * 0x1p-52 - 1.0; }

 private:
  std::uint64_t state_;
};

}  // namespace tradewind
