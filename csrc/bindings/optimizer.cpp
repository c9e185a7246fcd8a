#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <utility>

#include "bindings/register.h"
#include "step/rule_table.h"
#include "torch/optimizer_table.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;

struct MeasureResult {
  double norm = 0.0;  // of the gradients as they lie in memory
  std::int64_t num_nonfinite = 0;
  std::string first_nonfinite_name;
  std::int64_t num_hot = 0;
};

// An OptimizerTable that knows which dicts its state tensors were put into.
class Table : public OptimizerTable {
 public:
  MeasureResult measure_all() {
    const py::gil_scoped_release release;
    const Measure& measured = measure();
    return {measured.norm(), measured.num_nonfinite(), first_nonfinite_name(), num_hot()};
  }

  // Fills `entry` (the optimizer's state dict of this parameter) with tensors over the arena.
  void add_state_to(std::int64_t parameter_idx, const py::typing::Dict<py::str, py::object>& entry,
                    const RuleInfo& rule, bool is_first) {
    State state = add_state(parameter_idx, is_first);
    Handed handed{entry, {}, {}};
    std::size_t count = 0;
    const auto put = [&](const char* name, const at::Tensor& tensor) {
      // One key object for all parameters: look-ups then compare pointers and stay in cache.
      const auto key = py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name));
      const py::object wrapped = py::cast(tensor);
      entry[key] = wrapped;
      handed.keys[count] = key;
      handed.tensors[count++] = wrapped;
    };
    if (state.step.defined()) put("step", state.step);
    for (std::size_t i = 0; i < state.tensors.size(); ++i) {
      put(rule.state_names[i], state.tensors[i]);
    }
    handed_.push_back(std::move(handed));
  }

  // Whether every state tensor handed out still stands in its dict.
  [[nodiscard]] bool owns_states() const {
    for (const Handed& handed : handed_) {
      for (std::size_t i = 0; i < handed.keys.size() && handed.keys[i]; ++i) {
        PyObject* found = PyDict_GetItemWithError(handed.entry.ptr(), handed.keys[i].ptr());
        if (found != handed.tensors[i].ptr()) return false;
      }
    }
    return true;
  }

 private:
  struct Handed {
    py::dict entry;
    // The states and the step; null beyond the last.
    std::array<py::object, kMaxStates + 1> keys, tensors;
  };
  std::vector<Handed> handed_;
};

void sweep(Table& table, const std::vector<std::pair<std::vector<double>, bool>>& groups,
           double gradient_multiplier) {
  const py::gil_scoped_release release;
  std::vector<GroupOptions> options;
  for (const auto& [values, maximize] : groups) options.push_back({values, maximize});
  table.sweep(options, gradient_multiplier);
}

}  // namespace

void register_optimizer(py::module_& module) {
  py::class_<MeasureResult>(module, "MeasureResult")
      .def_readonly("norm", &MeasureResult::norm)
      .def_readonly("num_nonfinite", &MeasureResult::num_nonfinite)
      .def_readonly("first_nonfinite_name", &MeasureResult::first_nonfinite_name)
      .def_readonly("num_hot", &MeasureResult::num_hot);
  module.attr("NO_LONGER_FITS") = OptimizerTable::kNoLongerFits;
  py::class_<Table> table(module, "OptimizerTable");
  table.def(py::init<>())
      .def("add_group", &Table::add_group, py::arg("rule_name"), py::arg("parameters"),
           py::arg("names"))
      .def("collect", &Table::collect)
      .def("measure", &Table::measure_all)
      .def("missing_state", &Table::missing_state)
      .def("add_state", &Table::add_state_to, py::arg("parameter_idx"), py::arg("entry"),
           py::arg("rule"), py::arg("is_first"))
      .def("owns_states", &Table::owns_states)
      .def("sweep", &sweep, py::arg("groups"), py::arg("gradient_multiplier"))
      .def("release_gradients", &Table::release_gradients)
      .def("enable_hot_measure", &Table::enable_hot_measure)
      .def(
          "set_hot",
          [](Table& self, bool enabled) {
            if (self.hot_measure() != nullptr) self.hot_measure()->set_enabled(enabled);
          },
          py::arg("enabled"))
      .def("install_hooks",
           [](Table& self) {
             if (self.hot_measure() != nullptr) self.hot_measure()->install();
           })
      .def("remove_hooks", [](Table& self) {
        if (self.hot_measure() != nullptr) self.hot_measure()->remove();
      });
  refuse_copies(table, "OptimizerTable");
}

}  // namespace tradewind::bindings
