// The oracle against the published formulas, in torch's order of operations.
#include "step/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/error_matching.h"
#include "base/split_mix.h"

namespace tradewind {
namespace {

struct Adam {
  double lr, beta1, beta2, eps, weight_decay;
  double average = 0.0, square = 0.0, largest = 0.0;

  double update(double parameter, double gradient, int step, bool amsgrad) {
    parameter -= lr * weight_decay * parameter;
    average = beta1 * average + (1 - beta1) * gradient;
    square = beta2 * square + (1 - beta2) * gradient * gradient;
    largest = std::fmax(largest, square);
    const double average_hat = average / (1 - std::pow(beta1, step));
    const double second = (amsgrad ? largest : square) / (1 - std::pow(beta2, step));
    return parameter - lr * average_hat / (std::sqrt(second) + eps);
  }
};

TEST(Oracle, AdamWFollowsThePaper) {
  for (const bool amsgrad : {false, true}) {
    SplitMix random(1);
    Adam adam{0.01, 0.9, 0.99, 1e-3, 0.1};
    double expected = 0.7;
    OracleArrays<double> arrays{{0.7}, {0.0}, {{0.0}, {0.0}}};
    if (amsgrad) arrays.states.push_back({0.0});
    for (int step = 1; step <= 200; ++step) {
      arrays.gradient[0] = random.uniform() * (step > 100 ? 0.1 : 1.0);
      expected = adam.update(expected, 2.0 * arrays.gradient[0], step, amsgrad);
      oracle_step<double>(amsgrad ? "adamw_amsgrad" : "adamw", {0.01, 0.9, 0.99, 1e-3, 0.1}, step,
                          step == 1, 2.0, arrays);
      // Some ten roundings a step of values below one.
      ASSERT_NEAR(arrays.parameter[0], expected, step * 16 * 0x1p-53) << step;
    }
    EXPECT_NEAR(arrays.states[1][0], adam.square, 200 * 0x1p-53);
    if (amsgrad) {
      EXPECT_GT(arrays.states[2][0], arrays.states[1][0]);
    }
  }
}

// eps stands outside of the root: with no second moment the update is average / eps.
TEST(Oracle, AdamWAddsEpsOutsideTheRoot) {
  OracleArrays<double> arrays{{0.0}, {1e-3}, {{0.0}, {0.0}}};
  oracle_step<double>("adamw", {1.0, 0.0, 0.0, 1.0, 0.0}, 1, true, 1.0, arrays);
  EXPECT_DOUBLE_EQ(arrays.parameter[0], -1e-3 / (1e-3 + 1.0));
}

TEST(Oracle, AmsgradKeepsANaNSecondMoment) {
  OracleArrays<float> arrays{{1.0F}, {NAN}, {{0.0F}, {0.0F}, {5.0F}}};
  oracle_step<float>("adamw_amsgrad", {0.1, 0.9, 0.99, 1e-8, 0.0}, 3, false, 1.0F, arrays);
  EXPECT_TRUE(std::isnan(arrays.states[2][0]));
  EXPECT_TRUE(std::isnan(arrays.parameter[0]));
}

double sgd_by_hand(double gradient, double parameter, double& buffer, bool is_first,
                   bool nesterov) {
  gradient += 0.25 * parameter;
  buffer = is_first ? gradient : 0.5 * buffer + (1 - 0.125) * gradient;
  return parameter - 0.0625 * (nesterov ? gradient + 0.5 * buffer : buffer);
}

TEST(Oracle, SgdFollowsTorchsDefinition) {
  for (const bool nesterov : {false, true}) {
    double parameter = 1.0;
    double buffer = 0.0;
    OracleArrays<double> arrays{{1.0}, {0.0}, {{0.0}}};
    for (int step = 1; step <= 4; ++step) {
      arrays.gradient[0] = 0.5 * step;
      parameter = sgd_by_hand(0.5 * step, parameter, buffer, step == 1, nesterov);
      oracle_step<double>("sgd_momentum", {0.0625, 0.5, 0.125, 0.25, nesterov ? 1.0 : 0.0}, step,
                          step == 1, 1.0, arrays);
      // Options are powers of two and few steps are taken: all is exact.
      EXPECT_EQ(arrays.parameter[0], parameter) << step;
      EXPECT_EQ(arrays.states[0][0], buffer) << step;
    }
  }
}

TEST(Oracle, PlainSgdHasNoState) {
  OracleArrays<float> arrays{{1.0F, 2.0F}, {4.0F, 8.0F}, {}};
  oracle_step<float>("sgd", {0.5, 0.0, 0.0, 0.0, 0.0}, 1, true, 0.25F, arrays);
  EXPECT_EQ(arrays.parameter, (std::vector<float>{0.5F, 1.0F}));
}

TEST(Oracle, BadInputIsRefused) {
  const auto step = [](std::string_view rule, std::vector<double> options,
                       OracleArrays<double> arrays) {
    oracle_step<double>(rule, options, 1, true, 1.0, arrays);
  };
  const std::vector<double> options{0.1, 0.0, 0.0, 0.0, 0.0};
  const auto refused = [&](std::vector<double> given, const OracleArrays<double>& arrays) {
    expect_error(ErrorKind::kBadValue, {"oracle sgd", "5 options", "0 states"},
                 [&] { step("sgd", given, arrays); });
  };
  refused({0.1}, {{1.0}, {1.0}, {}});
  refused(options, {{1.0}, {1.0, 2.0}, {}});
  refused(options, {{1.0}, {1.0}, {{0.0}}});
  expect_error(ErrorKind::kBadValue, {"oracle sgd_momentum"},
               [&] { step("sgd_momentum", options, {{1.0}, {1.0}, {{0.0, 0.0}}}); });
  expect_error(ErrorKind::kBadValue, {"'lamb2'"},
               [&] { step("lamb2", options, {{1.0}, {1.0}, {}}); });
}

}  // namespace
}  // namespace tradewind
