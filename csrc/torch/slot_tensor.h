// Tensors over arena slots. Each gets a StorageImpl of its own that covers just its slot and keeps
// the arena alive, so that torch.save, deepcopy and safetensors see one parameter, not the arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "arena/dtype.h"

namespace tradewind {

// The arena's name for a torch dtype, if an arena can hold it, and back.
std::optional<DType> arena_dtype(at::ScalarType scalar_type);
at::ScalarType torch_dtype(DType dtype);

// Elements occupy one gapless run of memory, in whatever order.
bool is_dense(const at::Tensor& tensor);
// Memory in which the gradient of a parameter can lie: its order of elements, without gaps.
at::Tensor dense_like(const at::Tensor& parameter);

// A complex number counts as its two parts.
DType real_dtype(const at::Tensor& values);
std::int64_t num_real_elements(const at::Tensor& values);
// Same shape and the same order of elements in memory.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// A tensor over `data` with `like`'s device, sizes and strides, and its dtype or another one.
// `like` must be dense. SAFETY: `data` holds the tensor's bytes and lives as long as `keeper`.
at::Tensor tensor_over(const at::Tensor& like, void* data, std::shared_ptr<const void> keeper);
at::Tensor tensor_over(const at::Tensor& like, at::ScalarType dtype, void* data,
                       std::shared_ptr<const void> keeper);
// Some elements in a row. SAFETY: the tensor does not keep `data`, which holds them on the device
// for as long as the tensor, and what is queued on it, lives.
at::Tensor row_over(void* data, std::int64_t num_elements, at::ScalarType dtype,
                    c10::Device device);

// Names for messages: "float32", "[3, 4]".
std::string dtype_text(at::ScalarType scalar_type);
std::string shape_text(const at::Tensor& tensor);

}  // namespace tradewind
