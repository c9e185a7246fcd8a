// PowerSGD's matrices against the paper's algorithms in float64, over ranks within this process.
#include "share/low_rank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "base/bfloat16.h"
#include "base/isa.h"
#include "share/kernels.h"

namespace tradewind {
namespace {

using Floats = std::vector<float>;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Floats random_floats(std::int64_t count, std::uint32_t seed, float scale = 1.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

Floats mean_of(const std::vector<Floats>& parts) {
  Floats mean(parts[0].size());
  for (std::size_t i = 0; i < mean.size(); ++i) {
    for (const Floats& part : parts) mean[i] += part[i];
    mean[i] /= static_cast<float>(parts.size());
  }
  return mean;
}

// One round of all ranks; `values` become the means. Ranks in `absent` have no data.
void share(std::vector<LowRankMatrix>& ranks, std::vector<Floats>& values,
           const std::vector<bool>& absent = {}) {
  const LowRankShape& shape = ranks[0].shape();
  std::vector<Floats> lefts, rights;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    Floats& left = lefts.emplace_back(static_cast<std::size_t>(shape.left_elements()));
    if (!absent.empty() && absent[r]) {
      ranks[r].stay_away(true, left.data());
    } else if (!std::all_of(values[r].begin(), values[r].end(),
                            [](float v) { return std::isfinite(v); })) {
      ranks[r].stay_away(false, left.data());
    } else {
      ranks[r].project(values[r].data(), DType::kFloat32, kSerial, left.data());
    }
  }
  const Floats left = mean_of(lefts);
  for (LowRankMatrix& rank : ranks) {
    Floats& right = rights.emplace_back(static_cast<std::size_t>(shape.right_elements()));
    rank.turn(left.data(), kSerial, right.data());
  }
  const Floats right = mean_of(rights);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].rebuild(right.data(), 1.0, kSerial, DType::kFloat32, values[r].data());
  }
}

// The same in float64, as matrices of columns.
struct Reference {
  std::int64_t rows, cols, rank;
  std::vector<std::vector<double>> errors;  // by rank of the group
  std::vector<double> right;                // of `rank` vectors

  static void orthonormalize(std::vector<double>& vectors, std::int64_t length) {
    const auto size = static_cast<std::size_t>(length);
    for (std::size_t begin = 0; begin < vectors.size(); begin += size) {
      for (std::size_t before = 0; before < begin; before += size) {
        double dot = 0.0;
        for (std::size_t i = 0; i < size; ++i) dot += vectors[before + i] * vectors[begin + i];
        for (std::size_t i = 0; i < size; ++i) vectors[begin + i] -= dot * vectors[before + i];
      }
      double norm = 0.0;
      for (std::size_t i = 0; i < size; ++i) norm += vectors[begin + i] * vectors[begin + i];
      for (std::size_t i = 0; i < size; ++i) vectors[begin + i] /= std::sqrt(norm);
    }
  }

  std::vector<double> share(const std::vector<Floats>& values) {
    const auto at = [&](std::int64_t i, std::int64_t j) {
      return static_cast<std::size_t>(i * cols + j);
    };
    const auto num_ranks = static_cast<double>(values.size());
    std::vector<double> left(static_cast<std::size_t>(rank * rows));
    for (std::size_t r = 0; r < values.size(); ++r) {
      for (std::size_t i = 0; i < errors[r].size(); ++i) {
        errors[r][i] += static_cast<double>(values[r][i]);
      }
      for (std::int64_t k = 0; k < rank; ++k) {
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            left[static_cast<std::size_t>(k * rows + i)] +=
                errors[r][at(i, j)] * right[static_cast<std::size_t>(k * cols + j)] / num_ranks;
          }
        }
      }
    }
    orthonormalize(left, rows);
    std::vector<double> mean(right.size());
    for (std::size_t r = 0; r < values.size(); ++r) {
      std::vector<double> own(right.size());
      for (std::int64_t k = 0; k < rank; ++k) {
        for (std::int64_t j = 0; j < cols; ++j) {
          double& sum = own[static_cast<std::size_t>(k * cols + j)];
          for (std::int64_t i = 0; i < rows; ++i) {
            sum += errors[r][at(i, j)] * left[static_cast<std::size_t>(k * rows + i)];
          }
          mean[static_cast<std::size_t>(k * cols + j)] += sum / num_ranks;
        }
      }
      const std::vector<double> sent = product(left, own);
      for (std::size_t i = 0; i < sent.size(); ++i) errors[r][i] -= sent[i];
    }
    std::vector<double> made = product(left, mean);
    right = mean;
    orthonormalize(right, cols);
    return made;
  }

  [[nodiscard]] std::vector<double> product(const std::vector<double>& left,
                                            const std::vector<double>& from) const {
    std::vector<double> made(static_cast<std::size_t>(rows * cols));
    for (std::int64_t k = 0; k < rank; ++k) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < cols; ++j) {
          made[static_cast<std::size_t>(i * cols + j)] +=
              left[static_cast<std::size_t>(k * rows + i)] *
              from[static_cast<std::size_t>(k * cols + j)];
        }
      }
    }
    return made;
  }
};

std::vector<LowRankMatrix> make_ranks(const LowRankShape& shape, int num_ranks) {
  std::vector<LowRankMatrix> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.emplace_back(shape, 7);
  return ranks;
}

double largest_difference(const Floats& a, const std::vector<double>& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return largest;
}

TEST(LowRankShape, ThinOnesHaveAtMostHalfTheElements) {
  EXPECT_EQ(low_rank_shape(64, 64, 4).rank, 4);
  EXPECT_EQ(low_rank_shape(64, 64, 16).rank, 16);
  EXPECT_EQ(low_rank_shape(64, 64, 17).rank, 0);
  EXPECT_EQ(low_rank_shape(3, 100'000, 4).rank, 0);
  EXPECT_EQ(low_rank_shape(1, 100'000, 1).rank, 0);
  EXPECT_EQ(low_rank_shape(0, 100, 1).rank, 0);
  EXPECT_EQ(low_rank_shape(100, 0, 1).rank, 0);
}

TEST(Orthonormalize, ReplacesWhatIsNoDirectionOfItsOwn) {
  constexpr std::int64_t kLength = 37;
  Floats vectors = random_floats(6 * kLength, 1, 1e-20F);
  const auto vector = [&](std::int64_t k) { return vectors.begin() + k * kLength; };
  std::fill_n(vector(1), kLength, 0.0F);
  std::copy_n(vector(0), kLength, vector(2));
  *vector(3) = kNaN;
  *vector(4) = std::numeric_limits<float>::infinity();
  orthonormalize(vectors, kLength, 5);
  for (std::int64_t a = 0; a < 6; ++a) {
    for (std::int64_t b = 0; b < 6; ++b) {
      double dot = 0.0;
      for (std::int64_t i = 0; i < kLength; ++i) {
        dot += static_cast<double>(vector(a)[i]) * static_cast<double>(vector(b)[i]);
      }
      EXPECT_NEAR(dot, a == b ? 1.0 : 0.0, 1e-6) << a << " and " << b;
    }
  }
}

TEST(LowRankMatrix, DoesAsThePaperHasIt) {
  for (const auto& [rows, cols, rank] :
       {std::tuple{40, 61, 1}, std::tuple{64, 600, 4}, std::tuple{130, 33, 3}}) {
    const LowRankShape shape = low_rank_shape(rows, cols, rank);
    ASSERT_EQ(shape.rank, rank);
    std::vector<LowRankMatrix> ranks = make_ranks(shape, 3);
    const auto first = ranks[0].directions();
    Reference reference{rows, cols, rank, {}, {first.begin(), first.end()}};
    reference.errors.assign(3, std::vector<double>(static_cast<std::size_t>(rows * cols)));
    for (std::uint32_t round = 0; round < 4; ++round) {
      std::vector<Floats> values;
      for (std::uint32_t r = 0; r < 3; ++r) {
        values.push_back(random_floats(rows * cols, 10 * round + r));
      }
      const std::vector<double> expected = reference.share(values);
      share(ranks, values);
      EXPECT_EQ(values[0], values[1]);
      EXPECT_EQ(values[0], values[2]);
      EXPECT_LT(largest_difference(values[0], expected), 2e-3) << "round " << round;
      for (std::size_t r = 0; r < 3; ++r) {
        const auto error = ranks[r].error();
        EXPECT_LT(largest_difference({error.begin(), error.end()}, reference.errors[r]), 2e-3);
      }
    }
  }
}

TEST(LowRankMatrix, WhatIsOfLowRankArrivesWhole) {
  const LowRankShape shape = low_rank_shape(50, 70, 2);
  std::vector<LowRankMatrix> ranks = make_ranks(shape, 2);
  std::vector<Floats> values;
  Floats expected(50 * 70);
  const Floats u = random_floats(50, 1), v = random_floats(70, 2);
  for (float weight : {1.0F, 3.0F}) {
    Floats& one = values.emplace_back(50 * 70);
    for (std::size_t i = 0; i < 50; ++i) {
      for (std::size_t j = 0; j < 70; ++j) one[i * 70 + j] = weight * u[i] * v[j];
    }
  }
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = 2.0F * values[0][i];
  share(ranks, values);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[0][i], expected[i], 1e-5);
  for (const float error : ranks[1].error()) EXPECT_NEAR(error, 0.0F, 1e-5);
}

TEST(LowRankMatrix, AParameterThatWasUnusedAtFirstIsStillLearnt) {
  const LowRankShape shape = low_rank_shape(32, 32, 2);
  std::vector<LowRankMatrix> ranks = make_ranks(shape, 1);
  std::vector<Floats> values{Floats(32 * 32)};
  share(ranks, values);
  EXPECT_EQ(values[0], Floats(32 * 32));
  values[0] = random_floats(32 * 32, 3);
  share(ranks, values);
  EXPECT_GT(*std::max_element(values[0].begin(), values[0].end()), 0.1F);
}

TEST(LowRankMatrix, WhatIsNotFiniteOnOneRankIsSoOnAllAndSpoilsNothing) {
  const LowRankShape shape = low_rank_shape(32, 48, 2);
  std::vector<LowRankMatrix> ranks = make_ranks(shape, 2);
  std::vector<Floats> values{random_floats(32 * 48, 1), random_floats(32 * 48, 2)};
  share(ranks, values);
  const Floats before(ranks[0].error().begin(), ranks[0].error().end());
  const Floats directions(ranks[0].directions().begin(), ranks[0].directions().end());

  values = {random_floats(32 * 48, 3), random_floats(32 * 48, 4)};
  values[1][100] = kNaN;
  share(ranks, values);
  for (const Floats& made : values) {
    EXPECT_TRUE(std::all_of(made.begin(), made.end(), [](float v) { return std::isnan(v); }));
  }
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(ranks[0].error()[i], before[i], 1e-5);
  EXPECT_TRUE(std::equal(directions.begin(), directions.end(), ranks[1].directions().begin()));
}

TEST(LowRankMatrix, ARankWithoutDataKeepsWhatItOwes) {
  const LowRankShape shape = low_rank_shape(32, 48, 2);
  std::vector<LowRankMatrix> ranks = make_ranks(shape, 2);
  std::vector<Floats> values{random_floats(32 * 48, 1), random_floats(32 * 48, 2)};
  share(ranks, values);
  const Floats before(ranks[1].error().begin(), ranks[1].error().end());
  values = {random_floats(32 * 48, 3), Floats(32 * 48)};
  share(ranks, values, {false, true});
  EXPECT_EQ(values[0], values[1]);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), ranks[1].error().begin()));
}

TEST(LowRankMatrix, TakesValuesOf16Bits) {
  const LowRankShape shape = low_rank_shape(32, 48, 4);
  LowRankMatrix wide(shape, 3), narrow(shape, 3);
  const Floats random = random_floats(32 * 48, 1);
  std::vector<std::uint16_t> stored;
  Floats values;
  for (const float value : random) {
    stored.push_back(to_bfloat16(value));
    values.push_back(from_bfloat16(stored.back()));
  }
  Floats left(static_cast<std::size_t>(shape.left_elements())), other_left = left;
  Floats right(static_cast<std::size_t>(shape.right_elements())), other_right = right;
  wide.project(values.data(), DType::kFloat32, kSerial, left.data());
  narrow.project(stored.data(), DType::kBFloat16, kSerial, other_left.data());
  EXPECT_EQ(left, other_left);
  wide.turn(left.data(), kSerial, right.data());
  narrow.turn(left.data(), kSerial, other_right.data());
  wide.rebuild(right.data(), 0.5, kSerial, DType::kFloat32, values.data());
  narrow.rebuild(right.data(), 0.5, kSerial, DType::kBFloat16, stored.data());
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(stored[i], to_bfloat16(values[i]));
}

TEST(LowRankMatrix, GivesUpARound) {
  const LowRankShape shape = low_rank_shape(32, 48, 4);
  LowRankMatrix matrix(shape, 3);
  const Floats values = random_floats(32 * 48, 1);
  Floats left(static_cast<std::size_t>(shape.left_elements()));
  matrix.project(values.data(), DType::kFloat32, kSerial, left.data());
  matrix.keep(DType::kFloat32, values.data());
  for (const float error : matrix.error()) EXPECT_EQ(error, 0.0F);
}

TEST(LowRankKernels, AllIsasAgreeToTheBit) {
  const LowRankShape shape{37, 1061, 3};
  const Floats matrix = random_floats(shape.rows * shape.cols, 1);
  const Floats right = random_floats(shape.right_elements(), 2);
  const Floats left = random_floats(shape.left_elements(), 3);
  const auto run = [&](std::string_view isa) {
    const LowRankKernels& kernels = share_kernels_for(isa).low_rank;
    Floats made_left(left.size()), made_right(right.size()), error = matrix, values = matrix;
    kernels.project(matrix.data(), shape, right.data(), 0, shape.rows, made_left.data());
    kernels.project_transposed(matrix.data(), shape, left.data(), 0, shape.cols, made_right.data());
    kernels.rebuild[0](left.data(), right.data(), made_right.data(), shape, 0, shape.rows,
                       error.data(), values.data());
    made_left.insert(made_left.end(), made_right.begin(), made_right.end());
    made_left.insert(made_left.end(), error.begin(), error.end());
    made_left.insert(made_left.end(), values.begin(), values.end());
    return made_left;
  };
  const Floats expected = run(supported_isas().front());
  for (const std::string_view isa : supported_isas()) EXPECT_EQ(run(isa), expected) << isa;
}

}  // namespace
}  // namespace tradewind
