// The rules beside AdamW and SGD against the published formulas, in torch's order of operations.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/split_mix.h"
#include "step/oracle.h"

namespace tradewind {
namespace {

using Values = std::vector<double>;

// Steps the oracle and a formula side by side on a few elements. formula(t, gradient, parameter)
// updates `parameter` in place, with state of its own.
template <class Formula>
void expect_same_path(std::string_view rule, const Values& options, const Formula& formula) {
  constexpr std::size_t kCount = 5;
  SplitMix random(1);
  Values parameter(kCount);
  for (double& value : parameter) value = random.uniform();
  OracleArrays<double> arrays{parameter, Values(kCount), {}};
  arrays.states.assign(rules()[static_cast<std::size_t>(find_rule(rule))].state_names.size(),
                       Values(kCount));
  for (int step = 1; step <= 100; ++step) {
    for (double& gradient : arrays.gradient) gradient = random.uniform() * (step > 50 ? 0.1 : 1.0);
    Values scaled = arrays.gradient;
    for (double& gradient : scaled) gradient *= 2.0;
    formula(step, scaled, parameter);
    oracle_step<double>(rule, options, step, step == 1, 2.0, arrays);
    for (std::size_t i = 0; i < kCount; ++i) {
      // Some ten roundings a step of values of one or less, which updates of some 0.01 carry on
      // with less than their own weight; powers and roots add as many ulps as there are steps.
      ASSERT_NEAR(arrays.parameter[i], parameter[i], step * 64 * 0x1p-53) << rule << " " << step;
    }
  }
}

TEST(OracleRules, AdamAddsDecayToTheGradient) {
  for (const bool amsgrad : {false, true}) {
    Values average(5), square(5), largest(5);
    expect_same_path(
        amsgrad ? "adam_amsgrad" : "adam", {0.01, 0.9, 0.99, 1e-3, 0.1},
        [&](int step, const Values& gradients, Values& parameter) {
          for (std::size_t i = 0; i < 5; ++i) {
            const double gradient = gradients[i] + 0.1 * parameter[i];
            average[i] = 0.9 * average[i] + (1 - 0.9) * gradient;
            square[i] = 0.99 * square[i] + (1 - 0.99) * gradient * gradient;
            largest[i] = std::fmax(largest[i], square[i]);
            const double second = amsgrad ? largest[i] : square[i];
            const double root = std::sqrt(second) / std::sqrt(1 - std::pow(0.99, step));
            parameter[i] -= 0.01 / (1 - std::pow(0.9, step)) * average[i] / (root + 1e-3);
          }
        });
  }
}

TEST(OracleRules, LionStepsBySigns) {
  Values average(5);
  expect_same_path("lion", {0.01, 0.9, 0.99, 0.1},
                   [&](int, const Values& gradients, Values& parameter) {
                     for (std::size_t i = 0; i < 5; ++i) {
                       const double mixed = 0.9 * average[i] + (1 - 0.9) * gradients[i];
                       const double sign = mixed > 0 ? 1.0 : -1.0;
                       parameter[i] -= 0.01 * (sign + 0.1 * parameter[i]);
                       average[i] = 0.99 * average[i] + (1 - 0.99) * gradients[i];
                     }
                   });
}

TEST(OracleRules, LionKeepsZeroAndNaN) {
  OracleArrays<double> arrays{{1.0, 1.0}, {0.0, NAN}, {{0.0, 0.0}}};
  oracle_step<double>("lion", {0.5, 0.9, 0.99, 0.0}, 1, true, 1.0, arrays);
  EXPECT_EQ(arrays.parameter[0], 1.0);
  EXPECT_TRUE(std::isnan(arrays.parameter[1]));
}

TEST(OracleRules, AdagradSumsSquaresAndSlowsDown) {
  Values sum(5);
  expect_same_path("adagrad", {0.01, 0.25, 0.1, 1e-3},
                   [&](int step, const Values& gradients, Values& parameter) {
                     for (std::size_t i = 0; i < 5; ++i) {
                       const double gradient = gradients[i] + 0.1 * parameter[i];
                       sum[i] += gradient * gradient;
                       parameter[i] -=
                           0.01 / (1 + (step - 1) * 0.25) * gradient / (std::sqrt(sum[i]) + 1e-3);
                     }
                   });
}

TEST(OracleRules, RmspropCentersAndKeepsMomentumWhereTold) {
  for (const bool centered : {false, true}) {
    for (const bool momentum : {false, true}) {
      Values square(5), average(5), buffer(5);
      const std::string name =
          std::string("rmsprop") + (centered ? "_centered" : "") + (momentum ? "_momentum" : "");
      expect_same_path(
          name, {0.001, 0.9, 1e-2, 0.1, 0.5}, [&](int, const Values& gradients, Values& parameter) {
            for (std::size_t i = 0; i < 5; ++i) {
              const double gradient = gradients[i] + 0.1 * parameter[i];
              square[i] = 0.9 * square[i] + (1 - 0.9) * gradient * gradient;
              average[i] = 0.9 * average[i] + (1 - 0.9) * gradient;
              const double second = centered ? square[i] - average[i] * average[i] : square[i];
              const double step = gradient / (std::sqrt(second) + 1e-2);
              buffer[i] = 0.5 * buffer[i] + step;
              parameter[i] -= 0.001 * (momentum ? buffer[i] : step);
            }
          });
    }
  }
}

double norm(const Values& values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

TEST(OracleRules, LambScalesByTheRatioOfNorms) {
  Values average(5), square(5);
  expect_same_path("lamb", {0.01, 0.9, 0.99, 1e-3, 0.1},
                   [&](int step, const Values& gradients, Values& parameter) {
                     Values direction(5);
                     for (std::size_t i = 0; i < 5; ++i) {
                       average[i] = 0.9 * average[i] + (1 - 0.9) * gradients[i];
                       square[i] = 0.99 * square[i] + (1 - 0.99) * gradients[i] * gradients[i];
                       const double average_hat = average[i] / (1 - std::pow(0.9, step));
                       const double square_hat = square[i] / (1 - std::pow(0.99, step));
                       direction[i] = average_hat / (std::sqrt(square_hat) + 1e-3);
                       direction[i] += 0.1 * parameter[i];
                     }
                     const double ratio = norm(parameter) / norm(direction);
                     for (std::size_t i = 0; i < 5; ++i) {
                       parameter[i] -= 0.01 * ratio * direction[i];
                     }
                   });
}

TEST(OracleRules, LambTakesTheDirectionAsItIsWhereANormIsZero) {
  OracleArrays<double> zero_parameter{{0.0, 0.0}, {4.0, -4.0}, {{0.0, 0.0}, {0.0, 0.0}}};
  oracle_step<double>("lamb", {0.5, 0.0, 0.0, 0.0, 0.0}, 1, true, 1.0, zero_parameter);
  EXPECT_EQ(zero_parameter.parameter, (Values{-0.5, 0.5}));
  OracleArrays<double> zero_direction{{2.0, 3.0}, {0.0, 0.0}, {{0.0, 0.0}, {0.0, 0.0}}};
  oracle_step<double>("lamb", {0.5, 0.0, 0.0, 1.0, 0.0}, 1, true, 1.0, zero_direction);
  EXPECT_EQ(zero_direction.parameter, (Values{2.0, 3.0}));
}

TEST(OracleRules, MuonAveragesTheGradientAndLooksAheadWhereTold) {
  for (const bool nesterov : {false, true}) {
    Values buffer(5);
    expect_same_path("muon", {0.01, 0.9, nesterov ? 1.0 : 0.0, 0.1},
                     [&](int, const Values& gradients, Values& parameter) {
                       for (std::size_t i = 0; i < 5; ++i) {
                         buffer[i] += (1 - 0.9) * (gradients[i] - buffer[i]);
                         const double ahead = gradients[i] + 0.9 * (buffer[i] - gradients[i]);
                         parameter[i] *= 1 - 0.01 * 0.1;
                         parameter[i] -= 0.01 * (nesterov ? ahead : buffer[i]);
                       }
                     });
  }
}

}  // namespace
}  // namespace tradewind
