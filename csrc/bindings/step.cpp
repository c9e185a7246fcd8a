#include <pybind11/stl.h>

#include "bindings/register.h"
#include "step/oracle.h"
#include "step/rule_table.h"
#include "step/sweep.h"

namespace tradewind::bindings {
namespace py = pybind11;

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
  module.def("clip_factor", &clip_factor, py::arg("norm"), py::arg("max_norm"));
}

}  // namespace tradewind::bindings
