// The exception table: ErrorKind -> Python exception. tests/python/test_exceptions.py has a test
// per row; docs/errors.md publishes it.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "base/error.h"
#include "bindings/register.h"

namespace tradewind::bindings {
namespace {

// Made once, and kept as long as the module.
PyObject* g_sharing_error = nullptr;

PyObject* python_exception(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadValue: return PyExc_ValueError;
    case ErrorKind::kBadType: return PyExc_TypeError;
    case ErrorKind::kBadState: return PyExc_RuntimeError;
    case ErrorKind::kOutOfMemory: return PyExc_MemoryError;
    case ErrorKind::kPeerLost: return g_sharing_error;
  }
  return PyExc_RuntimeError;
}

struct AutogradError final : torch::PyTorchError {
  AutogradError(PyObject* type, std::string text)
      : torch::PyTorchError(std::move(text)), type_(type) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;
};

}  // namespace

void throw_through_autograd(const Error& error) {
  throw AutogradError(python_exception(error.kind()), error.what());
}

void register_exceptions(pybind11::module_& module) {
  g_sharing_error = PyErr_NewExceptionWithDoc(
      "tradewind.SharingError",
      "Another rank is gone, late, or has ended the exchange of gradients; every rank gets one.",
      PyExc_RuntimeError, nullptr);
  module.attr("SharingError") = pybind11::reinterpret_borrow<pybind11::object>(g_sharing_error);
  pybind11::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(python_exception(error.kind()), error.what());
    }
  });
}

}  // namespace tradewind::bindings
