// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/error.h"
#include "bindings/c10d.h"
#include "bindings/register.h"
#include "torch/c10d_comm.h"
#include "torch/c10d_peers.h"
#include "torch/collective_gradients.h"
#include "torch/slot_tensor.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;
using Shared = CollectiveGradients;

struct CollectiveOptions : RoundOptions {
  bool is_deterministic = false;
  std::string cuda_library;
  bool emulates_device = false;  // a GPU's arithmetic over an emulated library
};

std::unique_ptr<Shared> make(const std::vector<at::Tensor>& parameters,
                             std::vector<std::string> names, const py::object& values,
                             const py::object& facts, const py::object& store,
                             const std::string& prefix, const CollectiveOptions& options) {
  if (parameters.empty()) {
    fail(ErrorKind::kBadValue, "parameters: expected at least one, got none");
  }
  Shared::Options made;
  options.fill(made);
  made.plan.piece_bytes = options.bucket_bytes;  // a bucket travels whole
  made.codec = codec_named(options.codec);
  made.error_feedback = options.error_feedback;
  made.is_deterministic = options.is_deterministic;
  made.patience = to_milliseconds(options.patience_s);
  made.deadline = to_milliseconds(options.deadline_s);
  made.cuda_library = options.cuda_library;
  made.emulates_device = options.emulates_device;
  auto facts_group = owned<c10d::ProcessGroup>(facts);
  auto values_group = values.is_none() ? c10::intrusive_ptr<c10d::ProcessGroup>()
                                       : owned<c10d::ProcessGroup>(values);
  auto board = make_c10d_board(owned<c10d::Store>(store), facts_group->getRank(), prefix);
  const py::gil_scoped_release release;
  return std::make_unique<Shared>(parameters, std::move(names), std::move(values_group),
                                  std::move(facts_group), std::move(board), std::move(made));
}

// --- the Comm itself, over tensors: for tests of it ----------------------------------------------

struct Places {
  const void* input;
  void* output;
  std::int64_t num_elements;
  DType dtype;
};

Places places_of(const at::Tensor& input, const at::Tensor& output, std::int64_t num_parts) {
  const auto dtype = arena_dtype(input.scalar_type());
  if (!dtype || !input.is_contiguous() || !output.is_contiguous() ||
      input.scalar_type() != output.scalar_type()) {
    fail(ErrorKind::kBadType, "comm: expected contiguous tensors of one dtype, got ",
         dtype_text(input.scalar_type()), " and ", dtype_text(output.scalar_type()));
  }
  return {input.const_data_ptr(), output.mutable_data_ptr(), input.numel() / num_parts, *dtype};
}

Reduction reduction_named(const std::string& name) {
  if (name == "sum") return Reduction::kSum;
  if (name == "max") return Reduction::kMax;
  if (name == "mean") return Reduction::kMean;
  fail(ErrorKind::kBadValue, "reduction: expected 'sum', 'max' or 'mean', got '", name, "'");
}

void register_comm(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<C10dComm> comm(module, "C10dComm");
  comm.def(py::init([](const py::object& group, double timeout_s) {
             C10dCommOptions options;
             options.timeout = to_milliseconds(timeout_s);
             return std::make_unique<C10dComm>(owned<c10d::ProcessGroup>(group),
                                               c10::Device(c10::kCPU), std::move(options));
           }),
           py::arg("group"), py::arg("timeout_s"), "On host memory.")
      .def_property_readonly("rank", &C10dComm::rank)
      .def_property_readonly("size", &C10dComm::size)
      .def(
          "all_reduce",
          [](C10dComm& self, const at::Tensor& values, const std::string& reduction) {
            const Places at = places_of(values, values, 1);
            self.all_reduce(at.input, at.output, at.num_elements, at.dtype,
                            reduction_named(reduction), nullptr);
          },
          unlocked)
      .def(
          "reduce_scatter",
          [](C10dComm& self, const at::Tensor& input, const at::Tensor& output,
             const std::string& reduction) {
            const Places at = places_of(input, output, self.size());
            self.reduce_scatter(at.input, at.output, at.num_elements, at.dtype,
                                reduction_named(reduction), nullptr);
          },
          unlocked)
      .def(
          "all_gather",
          [](C10dComm& self, const at::Tensor& input, const at::Tensor& output) {
            const Places at = places_of(input, output, 1);
            self.all_gather(at.input, at.output, at.num_elements, at.dtype, nullptr);
          },
          unlocked)
      .def(
          "all_to_all",
          [](C10dComm& self, const at::Tensor& input, const at::Tensor& output) {
            const Places at = places_of(input, output, self.size());
            self.all_to_all(at.input, at.output, at.num_elements, at.dtype, nullptr);
          },
          unlocked)
      .def(
          "broadcast",
          [](C10dComm& self, const at::Tensor& values, int root) {
            const Places at = places_of(values, values, 1);
            self.broadcast(at.output, at.num_elements, at.dtype, root, nullptr);
          },
          unlocked)
      .def(
          "barrier",
          [](C10dComm& self, double timeout_s) {
            self.barrier(nullptr, std::chrono::steady_clock::now() + to_milliseconds(timeout_s));
          },
          unlocked)
      .def("check", &C10dComm::check)
      .def(
          "abort",
          [](C10dComm& self, double timeout_s) {
            self.abort(std::chrono::steady_clock::now() + to_milliseconds(timeout_s));
          },
          unlocked);
  refuse_copies(comm, "C10dComm");
}

}  // namespace

void register_collective(py::module_& module) {
  register_comm(module);
  py::class_<CollectiveOptions, RoundOptions>(module, "CollectiveOptions")
      .def(py::init<>())
      .def_readwrite("is_deterministic", &CollectiveOptions::is_deterministic)
      .def_readwrite("cuda_library", &CollectiveOptions::cuda_library)
      .def_readwrite("emulates_device", &CollectiveOptions::emulates_device);

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Shared, GradientRounds> shared(module, "CollectiveGradients");
  shared
      .def(py::init(&make), py::arg("parameters"), py::arg("names"), py::arg("values"),
           py::arg("facts"), py::arg("store"), py::arg("prefix"), py::arg("options"))
      .def("nonfinite_facts", &Shared::nonfinite_facts, unlocked)
      .def("nonfinite_of", &Shared::nonfinite_of, unlocked)
      .def("found_inf", &Shared::found_inf, unlocked);
  refuse_copies(shared, "CollectiveGradients");
}

}  // namespace tradewind::bindings
