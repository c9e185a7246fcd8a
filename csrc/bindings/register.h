// One function a room; module.cpp calls them. Bindings only translate: values are checked in Python
// configuration and in the core.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "arena/gate.h"
#include "base/error.h"

namespace tradewind::bindings {

void register_exceptions(pybind11::module_& module);
// Throws `error` such that torch's autograd raises it in Python as the exception table has it.
[[noreturn]] void throw_through_autograd(const Error& error);
void register_env(pybind11::module_& module);
void register_arena(pybind11::module_& module);
void register_checkpoint(pybind11::module_& module);
void register_step(pybind11::module_& module);
void register_cuda(pybind11::module_& module);
void register_optimizer(pybind11::module_& module);
void register_share(pybind11::module_& module);
void register_collective(pybind11::module_& module);

// Native handles own memory that a copy could not share: pickle and deepcopy say so by name.
template <class Class>
void refuse_copies(Class& cls, const std::string& name) {
  const auto refuse = [name](const pybind11::object&, const pybind11::args&) -> pybind11::object {
    throw pybind11::type_error(name +
                               " is a native handle and cannot be pickled or copied; use "
                               "state_dict() of the model or optimizer that owns it");
  };
  for (const char* method : {"__reduce_ex__", "__deepcopy__", "__copy__"}) cls.def(method, refuse);
}

// (address, size in bytes) of each.
inline std::vector<std::pair<std::uintptr_t, std::int64_t>> addresses_of(
    const std::vector<MemoryRange>& ranges) {
  std::vector<std::pair<std::uintptr_t, std::int64_t>> found;
  for (const MemoryRange& range : ranges) {
    found.emplace_back(reinterpret_cast<std::uintptr_t>(range.begin), range.size_bytes);
  }
  return found;
}

}  // namespace tradewind::bindings
