#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/error.h"
#include "bindings/register.h"
#include "step/oracle.h"
#include "step/rule_table.h"
#include "step/stored_array.h"
#include "step/sweep.h"
#include "torch/slot_tensor.h"

namespace tradewind::bindings {
namespace py = pybind11;
namespace {

void check_blocks(const at::Tensor& codes, const at::Tensor& exponents) {
  if (codes.scalar_type() != at::kByte || exponents.scalar_type() != at::kByte ||
      !codes.device().is_cpu() || !exponents.device().is_cpu() || !is_dense(codes) ||
      !exponents.is_contiguous() || exponents.numel() != num_exponent_blocks(codes.numel())) {
    fail(ErrorKind::kBadValue,
         "8-bit state: expected dense uint8 codes and one uint8 exponent for ",
         kExponentBlockElements, " of them, got ", codes.numel(), " and ", exponents.numel());
  }
}

}  // namespace

void register_step(py::module_& module) {
  py::class_<RuleInfo>(module, "Rule")
      .def_property_readonly("name", [](const RuleInfo& rule) { return std::string(rule.name); })
      .def_property_readonly("option_names",
                             [](const RuleInfo& rule) {
                               return std::vector<std::string>(rule.option_names.begin(),
                                                               rule.option_names.end());
                             })
      .def_property_readonly("state_names",
                             [](const RuleInfo& rule) {
                               return std::vector<std::string>(rule.state_names.begin(),
                                                               rule.state_names.end());
                             })
      .def_property_readonly("state_is_positive",
                             [](const RuleInfo& rule) {
                               return std::vector<bool>(rule.state_is_positive.begin(),
                                                        rule.state_is_positive.end());
                             })
      .def_property_readonly("counts_steps",
                             [](const RuleInfo& rule) { return rule.counts_steps; });
  module.def(
      "rule",
      [](const std::string& name) { return rules()[static_cast<std::size_t>(find_rule(name))]; },
      py::arg("name"));
  module.def(
      "isa", [] { return std::string(kernels().isa); },
      "The instruction set that this process's kernels use.");
  module.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const std::string_view name : supported_isas()) names.emplace_back(name);
    return names;
  });
  module.def(
      "oracle_step",
      [](const std::string& rule_name, const std::vector<double>& options, std::int64_t step,
         bool is_first, const std::vector<double>& parameter, const std::vector<double>& gradient,
         const std::vector<std::vector<double>>& states) {
        OracleArrays<double> arrays{parameter, gradient, states};
        oracle_step(rule_name, options, step, is_first, 1.0, arrays);
        return py::make_tuple(arrays.parameter, arrays.states);
      },
      py::arg("rule_name"), py::arg("options"), py::arg("step"), py::arg("is_first"),
      py::arg("parameter"), py::arg("gradient"), py::arg("states"),
      "One step in float64, element by element: (new parameter, new states).");
  module.def(
      "decode_blocks",
      [](const at::Tensor& codes, const at::Tensor& exponents, bool has_sign) {
        check_blocks(codes, exponents);
        at::Tensor values = codes.to(at::kFloat);
        decode_blocks(static_cast<const std::uint8_t*>(codes.const_data_ptr()),
                      static_cast<const std::uint8_t*>(exponents.const_data_ptr()), codes.numel(),
                      has_sign, static_cast<float*>(values.mutable_data_ptr()));
        return values;
      },
      py::arg("codes"), py::arg("exponents"), py::arg("has_sign"),
      "What 8-bit state stands for, in float32.");
  module.def(
      "join_floats",
      [](const at::Tensor& high, const at::Tensor& low) {
        if (high.scalar_type() != at::kBFloat16 || low.scalar_type() != at::kShort ||
            !same_layout(high, low) || !is_dense(high)) {
          fail(ErrorKind::kBadValue,
               "join_floats: expected bfloat16 and int16 of one dense layout");
        }
        at::Tensor values = high.detach().to(at::kFloat);
        join_floats(static_cast<const std::uint16_t*>(high.const_data_ptr()),
                    static_cast<const std::uint16_t*>(low.const_data_ptr()), high.numel(),
                    static_cast<float*>(values.mutable_data_ptr()));
        return values;
      },
      py::arg("high"), py::arg("low"), "The float32 values of parameters with split masters.");
  module.def("clip_factor", &clip_factor, py::arg("norm"), py::arg("max_norm"));
}

}  // namespace tradewind::bindings
