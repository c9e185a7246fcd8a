#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "base/error.h"
#include "bindings/register.h"
#include "step/cuda/library.h"
#include "step/rule_table.h"
#include "torch/slot_tensor.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;

float* device_floats(const at::Tensor& tensor, const at::Tensor& like, const char* role) {
  if (!tensor.is_cuda() || tensor.scalar_type() != at::kFloat || tensor.sizes() != like.sizes() ||
      !tensor.is_contiguous()) {
    fail(ErrorKind::kBadValue, role, ": expected a contiguous float32 CUDA tensor of shape ",
         like.sizes(), ", got ", dtype_text(tensor.scalar_type()), " ", tensor.sizes(), " on ",
         tensor.device());
  }
  // SAFETY: checked above; the kernel writes parameters and states only.
  return static_cast<float*>(const_cast<void*>(tensor.const_data_ptr()));
}

// One rule, one step count, any number of tensors: several launches where they are many.
void adamw(const CudaLibrary& library, const std::vector<at::Tensor>& parameters,
           const std::vector<at::Tensor>& gradients,
           const std::vector<std::vector<at::Tensor>>& states, bool amsgrad,
           const std::vector<double>& options, std::int64_t step, double multiplier,
           const std::optional<at::Tensor>& device_multiplier, std::uintptr_t stream) {
  const RuleInfo& rule =
      rules()[static_cast<std::size_t>(find_rule(amsgrad ? "adamw_amsgrad" : "adamw"))];
  if (options.size() != rule.option_names.size() || gradients.size() != parameters.size() ||
      states.size() != parameters.size()) {
    fail(ErrorKind::kBadValue, "adamw: expected ", rule.option_names.size(),
         " options and as many gradients and states as parameters");
  }
  std::vector<TradewindCudaTensor> tensors;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (states[i].size() != rule.state_names.size()) {
      fail(ErrorKind::kBadValue, "adamw: expected ", rule.state_names.size(), " states, got ",
           states[i].size());
    }
    TradewindCudaTensor tensor{device_floats(parameters[i], parameters[i], "parameter"),
                               device_floats(gradients[i], parameters[i], "gradient"),
                               {},
                               parameters[i].numel()};
    for (std::size_t s = 0; s < states[i].size(); ++s) {
      tensor.states[s] = device_floats(states[i][s], parameters[i], "state");
    }
    tensors.push_back(tensor);
  }
  ScalarBlock scalars;
  rule.scalars_float(options.data(), step, false, &scalars);
  const float* factor = device_multiplier
                            ? device_floats(*device_multiplier, *device_multiplier, "multiplier")
                            : nullptr;
  for (std::size_t first = 0; first < tensors.size(); first += TRADEWIND_CUDA_MAX_TENSORS) {
    const auto count = std::min<std::size_t>(TRADEWIND_CUDA_MAX_TENSORS, tensors.size() - first);
    library.check(
        library.adamw(&tensors[first], static_cast<int>(count), scalars.bytes, amsgrad ? 1 : 0,
                      static_cast<float>(multiplier), factor, reinterpret_cast<void*>(stream)),
        "adamw on CUDA");
  }
  for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void register_cuda(py::module_& module) {
  py::class_<CudaLibrary> library(module, "CudaLibrary");
  library.def(py::init<const std::string&>(), py::arg("path"))
      .def(
          "probe",
          [](const CudaLibrary& self) {
            int num_devices = 0;
            int compute_capability = 0;
            const int code = self.probe(&num_devices, &compute_capability);
            return py::make_tuple(code, std::string(self.error_text(code)), num_devices,
                                  compute_capability);
          },
          "(error code, its text, devices, compute capability of the first as 10 * major + minor)")
      .def("adamw", &adamw, py::arg("parameters"), py::arg("gradients"), py::arg("states"),
           py::arg("amsgrad"), py::arg("options"), py::arg("step"), py::arg("multiplier"),
           py::arg("device_multiplier"), py::arg("stream"));
  refuse_copies(library, "CudaLibrary");
}

}  // namespace tradewind::bindings
