// Muon's step between its two sweeps: Newton-Schulz iterations in bfloat16 by torch's matrix
// products, as torch.optim.Muon makes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace tradewind {

struct MatrixOptions {
  std::array<double, 3> coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  std::int64_t num_iterations = 5;
  // "original" (Jordan), "match_rms_adamw" (Liu et al., 2025, arXiv:2502.16982) or "none".
  std::string_view adjust_lr = "original";
};

// Overwrites `direction`, a matrix of float32 (or float64) with `like`'s sizes and strides.
void orthogonalize(const at::Tensor& like, bool is_double, void* direction,
                   const MatrixOptions& options);

// What the adjustment multiplies lr by for a matrix of this shape.
double matrix_lr_factor(at::IntArrayRef shape, std::string_view adjust_lr);

}  // namespace tradewind
