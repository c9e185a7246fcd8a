// A path as Python has it: str, bytes or os.PathLike, encoded as os.fsencode does, so that names
// which are not UTF-8 come through. Stubs say str. ValueError for a NUL inside.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace tradewind::bindings {

struct Path {
  std::string bytes;
};

inline pybind11::str decoded_path(const std::string& path) {
  PyObject* text =
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<pybind11::ssize_t>(path.size()));
  if (text == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(text);
}

}  // namespace tradewind::bindings

template <>
struct pybind11::detail::type_caster<tradewind::bindings::Path> {
  PYBIND11_TYPE_CASTER(tradewind::bindings::Path, const_name("str"));

  bool load(handle source, bool /*convert*/) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(source.ptr(), &encoded) == 0) {
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw error_already_set();
      PyErr_Clear();
      return false;
    }
    value.bytes = std::string(reinterpret_steal<pybind11::bytes>(encoded));
    return true;
  }
};
