// What an optimizer's table takes as a parameter and as a gradient, and the copies in a parameter's
// order of elements where they cannot be stepped in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "arena/dtype.h"
#include "torch/group_state.h"

namespace tradewind {

// Throws Error naming the parameter unless it is strided, on the device, of a floating or complex
// dtype, and no two of its elements share a place.
DType check_parameter(const at::Tensor& parameter, c10::Device device, const std::string& name);
// Throws Error naming the parameter for an option of storage that its dtype cannot have.
void check_storage(const StorageOptions& storage, DType dtype, const std::string& name);
// Throws Error naming the parameter for a gradient that is sparse, or of another shape or device,
// or not of numbers alike.
void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                    const std::string& name);
// Throws Error naming two parameters that share memory.
void check_overlap(const std::vector<at::Tensor>& parameters,
                   const std::vector<std::string>& names);

std::uint32_t version_of(const at::Tensor& tensor);
// Whether bits of the tensor say "read me differently": the memory, if it has any, is not the
// value.
bool is_lazy_view(const at::Tensor& tensor);
// In the dtype and on the device of `source`, in the order of elements of `like`.
at::Tensor copy_laid_out_like(const at::Tensor& source, const at::Tensor& like);

}  // namespace tradewind
