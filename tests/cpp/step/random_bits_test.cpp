// The random bits that formats round with: reproducible, even, and different for every element,
// state, parameter, step and seed.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <set>

#include "step/bit_patterns.h"
#include "step/format.h"

namespace tradewind {
namespace {

// They are part of a run's reproducibility: the same on every machine and in every version. Of
// element 0, lowbias32 of the key, by its published definition.
TEST(RandomBits, AreTheHashOfTheirKeyForElementZero) {
  SplitMix random(5);
  for (int i = 0; i < 1000; ++i) {
    const auto key = static_cast<std::uint32_t>(random.next());
    std::uint64_t x = key;
    x = (x ^ (x >> 16)) * 0x7FEB352D % (std::uint64_t{1} << 32);
    x = (x ^ (x >> 15)) * 0x846CA68B % (std::uint64_t{1} << 32);
    x = x ^ (x >> 16);
    ASSERT_EQ(random_bits(key, 0), x);
    ASSERT_EQ(random_bits(key ^ 12345U, 12345), x);
  }
}

TEST(RandomBits, AreEvenInEveryBit) {
  constexpr int kCount = 100'000;
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1} << 32, std::int64_t{1} << 40}) {
    std::array<int, 32> ones{};
    for (std::int64_t i = first; i < first + kCount; ++i) {
      const std::uint32_t bits = random_bits(0x12345678, i);
      for (std::size_t bit = 0; bit < 32; ++bit) ones[bit] += static_cast<int>((bits >> bit) & 1U);
    }
    for (std::size_t bit = 0; bit < 32; ++bit) {
      EXPECT_NEAR(ones[bit] / double{kCount}, 0.5, coin_bound(0.5, kCount)) << "bit " << bit;
    }
  }
}

// How often each bit of two sequences agrees: half of the time where they know nothing of each
// other.
template <class Bits>
void expect_independent(const Bits& a, const Bits& b) {
  constexpr int kCount = 20'000;
  std::array<int, 32> equal{};
  for (std::int64_t i = 0; i < kCount; ++i) {
    for (std::size_t bit = 0; bit < 32; ++bit) {
      equal[bit] += static_cast<int>(((~(a(i) ^ b(i))) >> bit) & 1U);
    }
  }
  for (std::size_t bit = 0; bit < 32; ++bit) {
    EXPECT_NEAR(equal[bit] / double{kCount}, 0.5, coin_bound(0.5, kCount)) << "bit " << bit;
  }
}

using Sequence = std::uint32_t (*)(std::int64_t);

TEST(RandomBits, DifferBetweenSeedsStepsParametersAndElements) {
  const Sequence base = [](std::int64_t i) { return random_bits(random_key(1, 5, 3), i); };
  const Sequence others[] = {
      [](std::int64_t i) { return random_bits(random_key(2, 5, 3), i); },
      [](std::int64_t i) { return random_bits(random_key(1, 6, 3), i); },
      [](std::int64_t i) { return random_bits(random_key(1, 5, 4), i); },
      [](std::int64_t i) { return random_bits(random_key(1, 3, 5), i); },
      [](std::int64_t i) { return random_bits(random_key(1, 5, 3), i + 1); },
      // Elements whose numbers agree in the lower 32 bits.
      [](std::int64_t i) { return random_bits(random_key(1, 5, 3), i + (std::int64_t{1} << 32)); },
      [](std::int64_t i) { return random_bits(random_key(1, 5, 3), i + (std::int64_t{7} << 33)); },
  };
  for (const Sequence other : others) expect_independent(base, other);
}

TEST(RandomKey, DiffersForEverySeedStepAndParameter) {
  std::set<std::uint32_t> keys;
  std::size_t num_keys = 0;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
    for (std::int64_t step = 0; step < 40; ++step) {
      for (std::int64_t parameter = 0; parameter < 40; ++parameter, ++num_keys) {
        keys.insert(random_key(seed, step, parameter));
        ASSERT_EQ(random_key(seed, step, parameter), random_key(seed, step, parameter));
      }
    }
  }
  // Of 4800 random numbers below 2^32 some 0.003 pairs are equal.
  EXPECT_EQ(keys.size(), num_keys);
}

TEST(RandomHalf, TheThreeStatesRoundIndependently) {
  std::array<std::array<int, 3>, 3> equal{};
  constexpr int kCount = 50'000;
  for (std::int64_t i = 0; i < kCount; ++i) {
    const std::uint32_t bits = random_bits(99, i);
    for (std::size_t a = 0; a < 3; ++a) {
      ASSERT_LT(random_half(bits, static_cast<int>(a)), 0x10000U);
      for (std::size_t b = 0; b < a; ++b) {
        const bool a_is_up = random_half(bits, static_cast<int>(a)) >= 0x8000U;
        const bool b_is_up = random_half(bits, static_cast<int>(b)) >= 0x8000U;
        equal[a][b] += a_is_up == b_is_up ? 1 : 0;
      }
    }
  }
  for (std::size_t a = 0; a < 3; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      EXPECT_NEAR(equal[a][b] / double{kCount}, 0.5, coin_bound(0.5, kCount)) << a << b;
    }
  }
}

}  // namespace
}  // namespace tradewind
