#include "torch/parameter_checks.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/error.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

// From the first element's byte to the end of the last one's, gaps included.
std::size_t extent_bytes(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return (static_cast<std::size_t>(last) + 1) * tensor.element_size();
}

}  // namespace

DType check_parameter(const at::Tensor& parameter, c10::Device device, const std::string& name) {
  const auto dtype = arena_dtype(parameter.scalar_type());
  if (parameter.layout() != at::kStrided || parameter.device() != device) {
    fail(ErrorKind::kBadType, "parameter '", name, "': expected a strided ",
         device.is_cpu() ? std::string("CPU") : device.str(), " tensor, got ", parameter.layout(),
         " on ", parameter.device());
  }
  if (parameter.is_nested() || parameter._is_zerotensor()) {
    fail(ErrorKind::kBadType, "parameter '", name, "': expected a strided tensor, got a ",
         parameter.is_nested() ? "nested one" : "zero tensor without memory",
         "; leave it out of the optimizer, or convert it");
  }
  if (!dtype || !(is_floating(*dtype) || is_complex(*dtype))) {
    fail(ErrorKind::kBadType, "parameter '", name,
         "': expected float32, float64, bfloat16, float16 or complex, got ",
         dtype_text(parameter.scalar_type()), "; leave it out of the optimizer, or convert it");
  }
  for (std::int64_t dim = 0; dim < parameter.dim(); ++dim) {
    if (parameter.stride(dim) == 0 && parameter.size(dim) > 1) {
      fail(ErrorKind::kBadValue, "parameter '", name,
           "': several of its elements share one place in memory (stride 0); call .contiguous() on "
           "it first");
    }
  }
  return *dtype;
}

void check_storage(const StorageOptions& storage, DType dtype, const std::string& name) {
  const auto refuse = [&](const char* option, const char* expected) {
    fail(ErrorKind::kBadValue, "parameter '", name, "': ", option, " expects ", expected, ", got ",
         dtype_name(dtype), "; leave that option out, or convert the parameter");
  };
  if (storage.master == Master::kSplit && dtype == DType::kFloat16) {
    refuse("masters='split'", "bfloat16 parameters (16 bits cannot hold what float16 lacks)");
  }
  const bool is_plain = storage.states == StatePrecision::kParameter;
  if (!is_plain && (dtype == DType::kFloat64 || is_complex(dtype))) {
    refuse("state_dtype", "float32, bfloat16 or float16 parameters");
  }
}

void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                    const std::string& name) {
  if (gradient.layout() != at::kStrided) {
    fail(ErrorKind::kBadState, "parameter '", name,
         "': sparse gradients are not supported; use sparse=False in the embedding, or "
         "torch.optim.SparseAdam");
  }
  const auto dtype = arena_dtype(gradient.scalar_type());
  const bool is_number =
      dtype && (parameter.is_complex() ? gradient.scalar_type() == parameter.scalar_type()
                                       : is_floating(*dtype));
  if (!is_number || gradient.device() != parameter.device() ||
      gradient.sizes() != parameter.sizes()) {
    fail(ErrorKind::kBadState, "parameter '", name, "': expected a gradient of ",
         dtype_text(parameter.scalar_type()), " ", shape_text(parameter), " on ",
         parameter.device(), ", got ", dtype_text(gradient.scalar_type()), " ",
         shape_text(gradient), " on ", gradient.device());
  }
}

void check_overlap(const std::vector<at::Tensor>& parameters,
                   const std::vector<std::string>& names) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].numel() > 0) order.push_back(i);
  }
  const auto address = [&](std::size_t i) {
    return reinterpret_cast<std::uintptr_t>(parameters[i].const_data_ptr());
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return address(a) < address(b); });
  const auto end = [&](std::size_t i) { return address(i) + extent_bytes(parameters[i]); };
  for (std::size_t i = 1, furthest = 0; i < order.size(); ++i) {
    const std::size_t before = order[furthest];
    const std::size_t here = order[i];
    // Two with gaps may interleave without touching (columns of one matrix): both are copied and
    // written back one after the other, as torch would step them.
    const bool may_interleave = !is_dense(parameters[before]) && !is_dense(parameters[here]);
    if (end(before) > address(here) && !may_interleave) {
      fail(ErrorKind::kBadValue, "parameters '", names[before], "' and '", names[here],
           "' share memory; to tie weights, use one Parameter object in both places");
    }
    if (end(here) > end(before)) furthest = i;
  }
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

at::Tensor copy_laid_out_like(const at::Tensor& source, const at::Tensor& like) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor plain = source.detach();
  at::Tensor copy = is_dense(like) ? plain.new_empty_strided(like.sizes(), like.strides())
                                   : plain.new_empty(like.sizes());
  return copy.copy_(plain);
}

bool is_lazy_view(const at::Tensor& tensor) {
  return tensor.is_neg() || tensor.is_conj() || tensor._is_zerotensor();
}

}  // namespace tradewind
