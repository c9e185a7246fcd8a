#include "torch/orthogonalize.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "torch/slot_tensor.h"

namespace tradewind {

void orthogonalize(const at::Tensor& like, bool is_double, void* direction,
                   const MatrixOptions& options) {
  const c10::AutoGradMode no_grad(false);
  // SAFETY: the tensor does not outlive this call; the direction is its caller's.
  at::Tensor values =
      tensor_over(like, is_double ? at::kDouble : at::kFloat, direction, std::make_shared<int>());
  const bool is_tall = like.size(0) > like.size(1);
  const auto [a, b, c] = options.coefficients;
  at::Tensor matrix = values.to(at::kBFloat16);
  if (is_tall) matrix = matrix.t();
  matrix = matrix.div(matrix.norm().clamp_min(options.eps));
  for (std::int64_t i = 0; i < options.num_iterations; ++i) {
    const at::Tensor gram = matrix.mm(matrix.t());
    const at::Tensor update = gram.addmm(gram, gram, b, c);
    matrix = matrix.addmm(update, matrix, a, 1.0);
  }
  values.copy_(is_tall ? matrix.t() : matrix);
}

double matrix_lr_factor(at::IntArrayRef shape, std::string_view adjust_lr) {
  const auto rows = static_cast<double>(shape[0]);
  const auto columns = static_cast<double>(shape[1]);
  if (adjust_lr == "original") return std::sqrt(std::max(1.0, rows / columns));
  if (adjust_lr == "match_rms_adamw") return 0.2 * std::sqrt(std::max(rows, columns));
  return 1.0;
}

}  // namespace tradewind
