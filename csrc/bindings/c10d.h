// What bindings of things over torch.distributed share.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "bindings/register.h"
#include "torch/gradient_rounds.h"

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

// What every way to share gradients is told.
struct RoundOptions {
  std::string codec = "none";
  bool error_feedback = true;
  std::int64_t bucket_bytes = PlanOptions{}.bucket_bytes;
  std::int64_t end_bucket_bytes = PlanOptions{}.end_bucket_bytes;
  double patience_s = 30.0;
  double deadline_s = 300.0;
  bool sums_microbatches = false;
  bool settles_itself = false;
  std::vector<at::Tensor> buffers;

  void fill(GradientRounds::Options& made) const {
    made.plan.bucket_bytes = bucket_bytes;
    made.plan.end_bucket_bytes = end_bucket_bytes;
    made.sums_microbatches = sums_microbatches;
    made.settles_itself = settles_itself;
    made.buffers = buffers;
    made.on_late = print_late;
    made.throw_through_autograd = throw_through_autograd;
  }
};

}  // namespace tradewind::bindings
