// The exception table: ErrorKind -> Python exception. tests/python/test_exceptions.py has a test
// per row; docs/errors.md publishes it.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/path.h"
#include "bindings/register.h"

namespace tradewind::bindings {
namespace py = pybind11;
namespace {

// Made once, and kept as long as the module.
PyObject* g_sharing_error = nullptr;
PyObject* g_checkpoint_error = nullptr;
PyObject* g_damaged_checkpoint_error = nullptr;

PyObject* python_exception(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadValue: return PyExc_ValueError;
    case ErrorKind::kBadType: return PyExc_TypeError;
    case ErrorKind::kBadState: return PyExc_RuntimeError;
    case ErrorKind::kOutOfMemory: return PyExc_MemoryError;
    case ErrorKind::kPeerLost: return g_sharing_error;
    case ErrorKind::kSystem: return PyExc_OSError;
    case ErrorKind::kDamaged: return g_damaged_checkpoint_error;
  }
  return PyExc_RuntimeError;
}

void set_python_error(const Error& error) {
  const SystemFailure* failure = error.system_failure();
  if (failure == nullptr) {
    PyErr_SetString(python_exception(error.kind()), error.what());
    return;
  }
  // OSError's constructor picks the subclass by the errno: FileNotFoundError and its like.
  const py::tuple arguments = py::make_tuple(failure->error_number, decoded_path(failure->reason),
                                             decoded_path(failure->path));
  const auto raised =
      py::reinterpret_steal<py::object>(PyObject_CallObject(PyExc_OSError, arguments.ptr()));
  if (raised) PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
}

// A class of the package's own name, kept as long as the module.
PyObject* new_exception(py::module_& module, const char* name, const char* doc, PyObject* base) {
  PyObject* made =
      PyErr_NewExceptionWithDoc(("tradewind." + std::string(name)).c_str(), doc, base, nullptr);
  if (made == nullptr) throw py::error_already_set();
  module.attr(name) = py::reinterpret_borrow<py::object>(made);
  return made;
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

void register_exceptions(py::module_& module) {
  g_sharing_error = new_exception(
      module, "SharingError",
      "Another rank is gone, late, or has ended the exchange of gradients; every rank gets one.",
      PyExc_RuntimeError);
  g_checkpoint_error =
      new_exception(module, "CheckpointError", "A checkpoint could not be saved, found or read.",
                    PyExc_RuntimeError);
  g_damaged_checkpoint_error =
      new_exception(module, "DamagedCheckpointError",
                    "What is on the disk is not what was written; names the file and the place.",
                    g_checkpoint_error);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
}

}  // namespace tradewind::bindings
