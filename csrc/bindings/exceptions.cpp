// The exception table: ErrorKind -> Python exception. tests/python/test_exceptions.py has a test
// per row; docs/errors.md publishes it.
#include <pybind11/pybind11.h>

#include "base/error.h"
#include "bindings/register.h"

namespace tradewind::bindings {
namespace {

PyObject* python_exception(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadValue: return PyExc_ValueError;
    case ErrorKind::kBadType: return PyExc_TypeError;
    case ErrorKind::kBadState: return PyExc_RuntimeError;
    case ErrorKind::kOutOfMemory: return PyExc_MemoryError;
  }
  return PyExc_RuntimeError;
}

}  // namespace

void register_exceptions() {
  pybind11::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(python_exception(error.kind()), error.what());
    }
  });
}

}  // namespace tradewind::bindings
