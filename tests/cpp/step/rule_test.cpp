#include "step/rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tradewind {
namespace {

TEST(Power, IsExactWhereTheResultIs) {
  for (const double base : {0.9, 0.999, 0.0, 1.0, 3.7}) {
    EXPECT_EQ(power(base, 0), 1.0);
    EXPECT_EQ(power(base, 1), base);
    EXPECT_EQ(power(base, 2), base * base);
    EXPECT_EQ(power(base, 3), base * (base * base));
  }
  for (int exponent = 0; exponent <= 33; ++exponent) {
    EXPECT_EQ(power(0.5, exponent), std::ldexp(1.0, -exponent));
    EXPECT_EQ(power(3.0, exponent), std::pow(3.0, exponent));  // 3^33 < 2^53
  }
  EXPECT_EQ(power(0.0, 5), 0.0);
  EXPECT_EQ(power(1.0, std::int64_t{1} << 62), 1.0);
}

TEST(Power, IsCloseToTheLibrarysPow) {
  for (const double base : {0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.999999}) {
    for (const std::int64_t step : {4, 5, 7, 10, 31, 100, 127, 1000, 4097, 100'000}) {
      const double expected = std::pow(base, static_cast<double>(step));
      // Each squaring doubles the relative error so far and adds half an ulp: step * 2^-53 in all,
      // one ulp more for the library, and one subnormal where the result underflows.
      const double bound = (static_cast<double>(step) + 2) * 0x1p-53 * expected +
                           std::numeric_limits<double>::denorm_min();
      EXPECT_NEAR(power(base, step), expected, bound) << base << "^" << step;
    }
  }
}

TEST(Power, VanishesForManySteps) {
  EXPECT_EQ(power(0.9, 1'000'000'000), 0.0);
  EXPECT_EQ(power(0.999, std::numeric_limits<std::int64_t>::max()), 0.0);
}

TEST(Root, IsTheCorrectlyRoundedOne) {
  for (const float value : {0.0F, 1.0F, 2.0F, 3.0F, 1e-45F, 1e-40F, 3.4e38F}) {
    // The root in float64, rounded: correct, since 53 >= 2 * 24 + 2 bits.
    EXPECT_EQ(root(value), static_cast<float>(std::sqrt(static_cast<double>(value))));
    EXPECT_EQ(root(static_cast<double>(value)), std::sqrt(static_cast<double>(value)));
  }
  EXPECT_TRUE(std::isnan(root(-1.0F)));
  EXPECT_TRUE(std::signbit(root(-0.0)));
}

}  // namespace
}  // namespace tradewind
