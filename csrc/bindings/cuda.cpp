#include <string>

#include "bindings/register.h"
#include "step/cuda/library.h"

namespace tradewind::bindings {
namespace py = pybind11;

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
          "(error code, its text, devices, compute capability of the first as 10 * major + minor)");
  refuse_copies(library, "CudaLibrary");
}

}  // namespace tradewind::bindings
