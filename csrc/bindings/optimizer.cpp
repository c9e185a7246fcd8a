#include <array>
#include <string_view>
#include <utility>

#include "bindings/register.h"
#include "bindings/state_tables.h"
#include "torch/backward_update.h"
#include "torch/optimizer_table.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;

using Table = StateTable<OptimizerTable>;

MeasureResult measure(Table& table) {
  const py::gil_scoped_release release;
  (void)table.measure();
  return table.measure_result();
}

void sweep_part(Table& table, const std::vector<std::size_t>& parameter_idx,
                const std::vector<GroupTuple>& groups, double gradient_multiplier,
                bool wants_changes) {
  const py::gil_scoped_release release;
  table.sweep_part(parameter_idx, group_options(groups), gradient_multiplier, wants_changes);
}

MeasureResult end_parts(Table& table) {
  const py::gil_scoped_release release;
  return table.end_parts();
}

void sweep(Table& table, const std::vector<GroupTuple>& groups, double gradient_multiplier,
           bool wants_changes) {
  const py::gil_scoped_release release;
  table.sweep(group_options(groups), gradient_multiplier, wants_changes);
}

constexpr std::pair<std::string_view, OptimizerTable::OnGradient> kOnGradient[] = {
    {"measure", OptimizerTable::OnGradient::kMeasure},
    {"sum", OptimizerTable::OnGradient::kSum},
    {"shared", OptimizerTable::OnGradient::kShared},
    {"update", OptimizerTable::OnGradient::kUpdate}};

BackwardUpdate& backward_update_of(const Table& table) {
  if (table.backward_update() == nullptr) {
    fail(ErrorKind::kBadState, "update in backward: expected hook_gradients('update') before it");
  }
  return *table.backward_update();
}

}  // namespace

void register_optimizer(py::module_& module) {
  py::class_<MeasureResult>(module, "MeasureResult")
      .def_readonly("norm", &MeasureResult::norm)
      .def_readonly("num_nonfinite", &MeasureResult::num_nonfinite)
      .def_readonly("first_nonfinite_name", &MeasureResult::first_nonfinite_name)
      .def_readonly("num_hot", &MeasureResult::num_hot);
  py::class_<BackwardUpdate::Result>(module, "BackwardUpdateResult")
      .def_readonly("norm", &BackwardUpdate::Result::norm)
      .def_readonly("num_updated", &BackwardUpdate::Result::num_updated)
      .def_readonly("num_withheld", &BackwardUpdate::Result::num_withheld)
      .def_readonly("num_nonfinite", &BackwardUpdate::Result::num_nonfinite)
      .def_readonly("first_nonfinite_name", &BackwardUpdate::Result::first_nonfinite_name);
  module.attr("NO_LONGER_FITS") = OptimizerParameters::kNoLongerFits;
  py::class_<MatrixOptions>(module, "MatrixOptions")
      .def(py::init([](std::array<double, 3> coefficients, double eps, std::int64_t num_iterations,
                       const std::string& adjust_lr) {
             constexpr std::pair<std::string_view, std::string_view> kAdjustments[] = {
                 {"original", "original"}, {"match_rms_adamw", "match_rms_adamw"}};
             return MatrixOptions{coefficients, eps, num_iterations,
                                  choose("adjust_lr_fn", adjust_lr, kAdjustments)};
           }),
           py::arg("coefficients"), py::arg("eps"), py::arg("num_iterations"),
           py::arg("adjust_lr"));
  py::class_<Table> table(module, "OptimizerTable");
  table
      .def(py::init([](const std::string& masters, const std::string& states, std::uint64_t seed) {
             return std::make_unique<Table>(storage_of(masters, states, seed));
           }),
           py::arg("masters") = "none", py::arg("state_dtype") = "parameter", py::arg("seed") = 0)
      .def("add_group", &Table::add_group, py::arg("rule_name"), py::arg("parameters"),
           py::arg("names"))
      .def("collect", &Table::collect)
      .def("measure", &measure)
      .def("sweep", &sweep, py::arg("groups"), py::arg("gradient_multiplier"),
           py::arg("wants_changes") = false)
      .def("sweep_part", &sweep_part, py::arg("parameter_idx"), py::arg("groups"),
           py::arg("gradient_multiplier"), py::arg("wants_changes") = false)
      .def("end_parts", &end_parts)
      .def("take_gradients",
           [](Table& self, const std::vector<std::optional<at::Tensor>>& gradients) {
             std::vector<at::Tensor> given;
             for (const auto& gradient : gradients)
               given.push_back(gradient.value_or(at::Tensor()));
             self.parameters().take_gradients(std::move(given));
           })
      .def(
          "statistics", [](const Table& self) { return columns_of(self.statistics()); },
          "Columns over the parameters that the last step went over, by name.")
      .def("skip", &Table::skip)
      .def(
          "hook_gradients",
          [](Table& self, const std::string& action) {
            self.hook_gradients(choose("action", action, kOnGradient));
          },
          py::arg("action"))
      .def(
          "memory_ranges", [](Table& self) { return addresses_of(self.parameters().memory()); },
          "(address, size in bytes) of the arenas of states, exponents and masters: memory that "
          "nothing but this table writes. Step counts are not in it.")
      .def("set_hot", &Table::set_hot, py::arg("measures"))
      .def("install_hooks", &Table::install_hooks)
      .def("remove_hooks", &Table::remove_hooks)
      .def("sum_gradients", &Table::sum_gradients, py::call_guard<py::gil_scoped_release>())
      .def("missing_state_anywhere",
           [](Table& self) { return self.parameters().missing_state_anywhere(); })
      .def(
          "begin_backward_update",
          [](Table& self, const std::vector<GroupTuple>& groups, bool wants_changes) {
            backward_update_of(self).begin(group_options(groups), wants_changes);
          },
          py::arg("groups"), py::arg("wants_changes"))
      .def("is_updating",
           [](const Table& self) {
             return self.backward_update() != nullptr && self.backward_update()->is_begun();
           })
      .def(
          "end_backward_update", [](Table& self) { return backward_update_of(self).end(); },
          py::call_guard<py::gil_scoped_release>());
  bind_state_table(table);
  refuse_copies(table, "OptimizerTable");
}

}  // namespace tradewind::bindings
