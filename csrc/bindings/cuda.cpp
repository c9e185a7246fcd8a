#include <string>

#include "bindings/register.h"
#include "bindings/state_tables.h"
#include "torch/device_backward_update.h"
#include "torch/device_table.h"

namespace tradewind::bindings {
namespace py = pybind11;
namespace {

using Table = StateTable<DeviceTable>;
using Tensor = std::optional<at::Tensor>;

void* stream_of(std::uintptr_t stream) {
  return reinterpret_cast<void*>(stream);  // NOLINT: torch gives streams as numbers
}

std::vector<at::Tensor> tensors_of(const std::vector<Tensor>& given) {
  std::vector<at::Tensor> tensors;
  for (const Tensor& one : given) tensors.push_back(one.value_or(at::Tensor()));
  return tensors;
}

void begin_backward_update(Table& table, const std::vector<GroupTuple>& groups,
                           const std::vector<Tensor>& learning_rates, bool wants_changes,
                           std::uintptr_t stream) {
  DeviceOrders orders;
  orders.measures = orders.vetoes_nonfinite = orders.wants_statistics = true;
  orders.wants_changes = wants_changes;
  table.backward_update()->begin(group_options(groups), tensors_of(learning_rates), orders,
                                 stream_of(stream));
}

void prepare(Table& table, const std::vector<GroupTuple>& groups,
             const std::vector<Tensor>& learning_rates, double gradient_multiplier, double max_norm,
             const Tensor& grad_scale, const Tensor& found_inf, bool measures,
             bool vetoes_nonfinite, bool wants_statistics, bool wants_changes, bool is_capturing) {
  DeviceOrders orders;
  orders.gradient_multiplier = gradient_multiplier;
  orders.max_norm = max_norm;
  orders.grad_scale = grad_scale.value_or(at::Tensor());
  orders.found_inf = found_inf.value_or(at::Tensor());
  orders.measures = measures;
  orders.vetoes_nonfinite = vetoes_nonfinite;
  orders.wants_statistics = wants_statistics;
  orders.wants_changes = wants_changes;
  orders.is_capturing = is_capturing;
  table.prepare(group_options(groups), tensors_of(learning_rates), orders);
}

// (norm, clip factor, applied, non-finite gradients, index of the first or -1, loss scale)
using Numbers = std::tuple<double, double, bool, std::int64_t, std::int64_t, double>;

Numbers outcome(const StepReading& reading) {
  const py::gil_scoped_release release;
  const TradewindCudaOutcome read = reading.outcome();
  return {read.norm,
          read.clip_factor,
          read.vetoed == 0,
          static_cast<std::int64_t>(read.num_nonfinite_slots),
          reading.first_nonfinite_parameter(),
          static_cast<double>(read.loss_scale)};
}

void register_reading(py::module_& module) {
  py::class_<StepReading, std::shared_ptr<StepReading>> reading(module, "StepReading");
  reading.def_property_readonly("is_captured", &StepReading::is_captured)
      .def("is_ready", &StepReading::is_ready, "Whether the device has come so far; never waits.")
      .def("outcome", &outcome,
           "(norm, clip factor, applied, non-finite gradients, index of the first or -1, loss\n"
           "scale)\n\nWaits for the device.")
      .def(
          "statistics", [](const StepReading& self) { return columns_of(self.statistics()); },
          "Columns over the step's parameters, by name; waits for the device.");
  refuse_copies(reading, "StepReading");
}

void register_table(py::module_& module) {
  py::class_<Table> table(module, "DeviceTable");
  table
      .def(py::init([](std::shared_ptr<CudaLibrary> library, const at::Device& device,
                       const std::string& masters, const std::string& states, std::uint64_t seed,
                       std::int64_t max_direction_bytes) {
             return std::make_unique<Table>(std::move(library), device,
                                            storage_of(masters, states, seed), max_direction_bytes);
           }),
           py::arg("library"), py::arg("device"), py::arg("masters"), py::arg("state_dtype"),
           py::arg("seed"), py::arg("max_direction_bytes"))
      .def("add_group", &Table::add_group, py::arg("rule_name"), py::arg("parameters"),
           py::arg("names"), py::arg("numbers"))
      .def("collect", &Table::collect)
      .def(
          "take_gradients",
          [](Table& self, const std::vector<Tensor>& given) {
            self.parameters().take_gradients(tensors_of(given));
          },
          py::arg("gradients"))
      .def("hook_sums", &Table::hook_sums)
      .def("hook_updates", &Table::hook_updates)
      .def(
          "missing_state_anywhere",
          [](Table& self) { return self.parameters().missing_state_anywhere(); },
          "Indices of parameters that require a gradient and have no state yet.")
      .def("begin_backward_update", &begin_backward_update, py::arg("groups"),
           py::arg("learning_rates"), py::arg("wants_changes"), py::arg("stream"))
      .def("is_updating",
           [](const Table& self) {
             return self.backward_update() != nullptr && self.backward_update()->is_begun();
           })
      .def(
          "end_backward_update", [](Table& self) { return self.backward_update()->end(); },
          py::call_guard<py::gil_scoped_release>(), "The numbers of each step that was queued.")
      .def("install_hooks", &Table::install_hooks)
      .def("remove_hooks", &Table::remove_hooks)
      .def("sum_gradients", &Table::sum_gradients, py::call_guard<py::gil_scoped_release>())
      .def("prepare", &prepare, py::arg("groups"), py::arg("learning_rates"), py::kw_only(),
           py::arg("gradient_multiplier"), py::arg("max_norm"), py::arg("grad_scale"),
           py::arg("found_inf"), py::arg("measures"), py::arg("vetoes_nonfinite"),
           py::arg("wants_statistics"), py::arg("wants_changes"), py::arg("is_capturing"))
      .def(
          "measure", [](Table& self, std::uintptr_t stream) { self.measure(stream_of(stream)); },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def(
          "update",
          [](Table& self, std::uintptr_t stream) { return self.update(stream_of(stream)); },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("read_again", &Table::read_again, py::call_guard<py::gil_scoped_release>())
      .def("sums", &Table::sums)
      .def(
          "keep_loss_scale",
          [](Table& self, double initial, double growth_factor, double backoff_factor,
             std::int32_t growth_interval, double floor) {
            self.keep_loss_scale(initial, {growth_factor, backoff_factor, floor, growth_interval});
          },
          py::arg("initial"), py::arg("growth_factor"), py::arg("backoff_factor"),
          py::arg("growth_interval"), py::arg("floor"))
      .def("loss_scale", &Table::loss_scale)
      .def("vetoed", &Table::vetoed)
      .def(
          "carry_over",
          [](Table& self, Table& before, const std::vector<std::int64_t>& from_idx) {
            self.carry_over(before, from_idx);
          },
          py::arg("before"), py::arg("from_idx"))
      .def_property_readonly("num_uploads", &Table::num_uploads);
  bind_state_table(table);
  refuse_copies(table, "DeviceTable");
}

}  // namespace

void register_cuda(py::module_& module) {
  py::class_<CudaLibrary, std::shared_ptr<CudaLibrary>> library(module, "CudaLibrary");
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
  register_reading(module);
  register_table(module);
}

}  // namespace tradewind::bindings
