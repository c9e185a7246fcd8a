// What bindings of things over torch.distributed share.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace tradewind::bindings {

template <class T>
c10::intrusive_ptr<T> owned(const pybind11::handle& object) {
  // torch counts references inside the object, whatever holds it in Python.
  return c10::intrusive_ptr<T>::reclaim_copy(object.cast<T*>());
}

inline std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

// The line about a late rank goes to stderr from a thread of the core: no Python there.
inline void print_late(const std::string& line) {
  std::fprintf(stderr, "tradewind: %s\n", line.c_str());
}

}  // namespace tradewind::bindings
