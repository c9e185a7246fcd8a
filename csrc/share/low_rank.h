// A matrix of gradients that travels as two thin ones: PowerSGD (Vogels et al., arXiv 1905.13727)
// with warm start and error feedback, as that paper's algorithms 1 and 2 have it. A round is
//   project() or stay_away() -> mean of `left` over ranks -> turn() -> mean of `right` -> rebuild()
// or, where nothing is to be changed, keep(). What `left` and `right` hold after a mean must be the
// same to the bit on all ranks; what rebuild() makes of it then is too, on any ISA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arena/dtype.h"
#include "base/parallel.h"

namespace tradewind {

struct ShareKernels;

// Row-major. Its thin ones lie as `rank` vectors one behind the other: left of `rows` elements
// each, right of `cols`.
struct LowRankShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t rank = 0;

  [[nodiscard]] std::int64_t left_elements() const { return rank * rows; }
  [[nodiscard]] std::int64_t right_elements() const { return rank * cols; }
};

// The shape in which this matrix travels with at most half its elements (torch's PowerSGD hook has
// the same bound, min_compression_rate=2); a rank of 0 where there is none.
LowRankShape low_rank_shape(std::int64_t rows, std::int64_t cols, std::int64_t wanted_rank);

class LowRankMatrix {
 public:
  // `seed`: the same on all ranks, another one for each matrix.
  LowRankMatrix(const LowRankShape& shape, std::uint64_t seed);

  [[nodiscard]] const LowRankShape& shape() const { return shape_; }

  // This rank's values, in memory order.
  void project(const void* values, DType dtype, const Parallel& parallel, float* left);
  // This rank has none: zeros, or, where they are not finite, NaN, which all ranks then get.
  void stay_away(bool is_finite, float* left);
  void turn(const float* left, const Parallel& parallel, float* right);
  // values = what both means make, times `factor`; until now they hold what project() was given.
  void rebuild(const float* right, double factor, const Parallel& parallel, DType dtype,
               void* values);
  // Gives up the round; `values` as for rebuild().
  void keep(DType dtype, const void* values);

  // For checkpoints: what this rank has not sent yet, and the directions that the next round starts
  // from, which are the same on all ranks.
  [[nodiscard]] std::span<float> error() { return error_; }
  [[nodiscard]] std::span<float> directions() { return right_; }

 private:
  LowRankShape shape_;
  std::uint64_t seed_;
  std::vector<float> error_;      // rows * cols
  std::vector<float> right_;      // orthonormal
  std::vector<float> left_;       // orthonormal, of this round
  std::vector<float> own_right_;  // before the mean
  bool is_in_ = false;            // project() has added values to the error
  bool is_lost_ = false;          // some rank's values were not finite
};

// Makes vectors of `length` elements, one behind the other, orthonormal: Gram-Schmidt, twice, which
// is enough (Giraud et al., 2005). One that is nearly a combination of those before it, or is not
// finite, becomes a random one: as zeros it would stay zeros in all rounds to come.
void orthonormalize(std::span<float> vectors, std::int64_t length, std::uint64_t seed);

}  // namespace tradewind
