// What the bindings of every table share: names of storages, and a table that knows which dicts its
// state tensors were put into.
#pragma once

#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "torch/optimizer_parameters.h"

namespace tradewind::bindings {

inline constexpr std::pair<std::string_view, Master> kMasters[] = {
    {"none", Master::kNone}, {"fp32", Master::kFloat32}, {"split", Master::kSplit}};
inline constexpr std::pair<std::string_view, StatePrecision> kStatePrecisions[] = {
    {"parameter", StatePrecision::kParameter},
    {"fp32", StatePrecision::kFloat32},
    {"bf16", StatePrecision::kBFloat16},
    {"8bit", StatePrecision::kEightBit}};

template <class Choices>
auto choose(const char* option, const std::string& given, const Choices& choices) {
  std::string known;
  for (const auto& [name, value] : choices) {
    if (given == name) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  fail(ErrorKind::kBadValue, option, ": expected one of ", known, ", got '", given, "'");
}

inline StorageOptions storage_of(const std::string& masters, const std::string& states,
                                 std::uint64_t seed) {
  return {choose("masters", masters, kMasters), choose("state_dtype", states, kStatePrecisions),
          seed};
}

// (option values, maximize, matrix options or None)
using GroupTuple = std::tuple<std::vector<double>, bool, std::optional<MatrixOptions>>;

inline std::vector<GroupOptions> group_options(const std::vector<GroupTuple>& groups) {
  std::vector<GroupOptions> options;
  for (const auto& [values, maximize, matrix] : groups) {
    options.push_back({values, maximize, matrix.value_or(MatrixOptions{})});
  }
  return options;
}

// Of the parameters that a step went over, by name.
inline pybind11::typing::Dict<pybind11::str, pybind11::typing::List<pybind11::float_>> columns_of(
    const std::vector<ParameterStatistics>& all) {
  namespace py = pybind11;
  using One = const ParameterStatistics&;
  const auto column = [&](auto get) {
    std::vector<decltype(get(all[0]))> values;
    for (const auto& one : all) values.push_back(get(one));
    return py::list(py::cast(values));
  };
  py::typing::Dict<py::str, py::typing::List<py::float_>> columns;
  columns["parameter_idx"] = column([](One one) { return one.parameter_idx; });
  columns["num_elements"] = column([](One one) { return one.num_elements; });
  columns["gradient_squares"] = column([](One one) { return one.measure.sum_of_squares; });
  columns["gradient_max"] = column([](One one) { return one.measure.max_abs; });
  columns["num_zeros"] = column([](One one) { return one.measure.num_zeros; });
  columns["parameter_squares"] = column([](One one) { return one.change.parameter_squares; });
  columns["change_squares"] = column([](One one) { return one.change.change_squares; });
  return columns;
}

// A table (one that has parameters() and add_state()) whose state tensors stand in an optimizer's
// state dicts.
template <class Table>
class StateTable : public Table {
 public:
  using Table::Table;

  // Fills `entry` (the optimizer's state dict of this parameter) with the tensors.
  void add_state_to(std::int64_t parameter_idx,
                    const pybind11::typing::Dict<pybind11::str, pybind11::object>& entry,
                    bool is_first) {
    Handed handed{entry, {}};
    std::vector<NamedTensor> added;
    {
      const pybind11::gil_scoped_release release;  // it may wait for a save
      added = this->add_state(parameter_idx, is_first);
    }
    for (NamedTensor& named : added) {
      // One key object for all parameters: look-ups then compare pointers and stay in cache.
      const auto key = pybind11::reinterpret_steal<pybind11::str>(
          PyUnicode_InternFromString(named.name.c_str()));
      const pybind11::object wrapped = pybind11::cast(named.tensor);
      entry[key] = wrapped;
      handed.tensors.emplace_back(key, wrapped);
    }
    handed_.push_back(std::move(handed));
  }

  // Whether every state tensor handed out still stands in its dict.
  [[nodiscard]] bool owns_states() const {
    for (const Handed& handed : handed_) {
      for (const auto& [key, tensor] : handed.tensors) {
        PyObject* found = PyDict_GetItemWithError(handed.entry.ptr(), key.ptr());
        if (found != tensor.ptr()) return false;
      }
    }
    return true;
  }

 private:
  struct Handed {
    pybind11::dict entry;
    std::vector<std::pair<pybind11::str, pybind11::object>> tensors;
  };
  std::vector<Handed> handed_;
};

// The methods that every table has.
template <class Table>
void bind_state_table(pybind11::class_<Table>& table) {
  namespace py = pybind11;
  table
      .def(
          "missing_state", [](Table& self) { return self.parameters().missing_state(); },
          "Indices of collected parameters that have no state yet.")
      .def("add_state", &Table::add_state_to, py::arg("parameter_idx"), py::arg("entry"),
           py::arg("is_first"))
      .def(
          "set_state",
          [](Table& self, std::int64_t parameter_idx, std::int64_t state_idx,
             const at::Tensor& values) {
            self.parameters().set_state(parameter_idx, state_idx, values);
          },
          py::arg("parameter_idx"), py::arg("state_idx"), py::arg("values"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "set_master",
          [](Table& self, std::int64_t parameter_idx, const at::Tensor& values) {
            self.parameters().set_master(parameter_idx, values);
          },
          py::arg("parameter_idx"), py::arg("values"), py::call_guard<py::gil_scoped_release>())
      .def("owns_states", &Table::owns_states)
      .def("release_gradients", &Table::release_gradients);
}

}  // namespace tradewind::bindings
