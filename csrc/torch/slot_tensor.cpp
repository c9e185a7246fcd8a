#include "torch/slot_tensor.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <sstream>
#include <utility>

namespace tradewind {
namespace {

using Keeper = std::shared_ptr<const void>;

void release_keeper(void* context) { delete static_cast<Keeper*>(context); }

}  // namespace

std::optional<DType> arena_dtype(at::ScalarType scalar_type) {
  switch (scalar_type) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kChar: return DType::kInt8;
    case at::kByte: return DType::kUInt8;
    case at::kShort: return DType::kInt16;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kBool: return DType::kBool;
    case at::kComplexFloat: return DType::kComplex64;
    case at::kComplexDouble: return DType::kComplex128;
    default: return std::nullopt;
  }
}

at::ScalarType torch_dtype(DType dtype) {
  constexpr at::ScalarType kTypes[kNumDTypes] = {
      at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,         at::kByte,
      at::kShort, at::kInt,    at::kLong,     at::kBool, at::kComplexFloat, at::kComplexDouble};
  return kTypes[static_cast<int>(dtype)];
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.strides() == b.strides()) return true;
  // Strides of extents of one say nothing about memory.
  if (!is_dense(a) || !is_dense(b)) return false;
  for (std::int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return a.numel() == 0;
  }
  return true;
}

at::Tensor tensor_over(const at::Tensor& like, void* data, std::shared_ptr<const void> keeper) {
  return tensor_over(like, like.scalar_type(), data, std::move(keeper));
}

at::Tensor tensor_over(const at::Tensor& like, at::ScalarType dtype, void* data,
                       std::shared_ptr<const void> keeper) {
  const auto num_bytes = static_cast<std::size_t>(like.numel()) * c10::elementSize(dtype);
  auto* context = new Keeper(std::move(keeper));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes,
      c10::DataPtr(data, context, &release_keeper, like.device()), /*allocator=*/nullptr,
      /*resizable=*/false);
  const auto key = like.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

at::Tensor row_over(void* data, std::int64_t num_elements, at::ScalarType dtype,
                    c10::Device device) {
  // The device is told, so that none is asked about the pointer.
  return at::for_blob(data, {num_elements})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

std::string dtype_text(at::ScalarType scalar_type) {
  const auto dtype = arena_dtype(scalar_type);
  return dtype ? std::string(dtype_name(*dtype)) : c10::toString(scalar_type);
}

std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

at::Tensor dense_like(const at::Tensor& parameter) {
  return is_dense(parameter) ? parameter.detach()
                             : parameter.detach().clone(at::MemoryFormat::Contiguous);
}

DType real_dtype(const at::Tensor& values) {
  const DType dtype = *arena_dtype(values.scalar_type());
  if (dtype == DType::kComplex64) return DType::kFloat32;
  return dtype == DType::kComplex128 ? DType::kFloat64 : dtype;
}

std::int64_t num_real_elements(const at::Tensor& values) {
  return values.numel() * (values.is_complex() ? 2 : 1);
}

}  // namespace tradewind
