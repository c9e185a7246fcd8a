// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/error.h"
#include "bindings/register.h"
#include "bindings/state_tables.h"
#include "torch/c10d_peers.h"
#include "torch/optimizer_table.h"
#include "torch/shared_gradients.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;
using std::chrono::milliseconds;

template <class T>
c10::intrusive_ptr<T> owned(const py::handle& object) {
  // torch counts references inside the object, whatever holds it in Python.
  return c10::intrusive_ptr<T>::reclaim_copy(object.cast<T*>());
}

struct ShareOptions {
  std::string codec = "none";
  bool error_feedback = true;
  std::int64_t bucket_bytes = PlanOptions{}.bucket_bytes;
  std::int64_t end_bucket_bytes = PlanOptions{}.end_bucket_bytes;
  std::int64_t piece_bytes = PlanOptions{}.piece_bytes;
  std::int64_t window_bytes = Exchange::Options{}.window_bytes;
  double patience_s = 30.0;
  double deadline_s = 300.0;
  bool sums_microbatches = false;
  bool measures = false;
  bool settles_itself = false;
  bool shards_update = false;
  std::int64_t low_rank = 0;  // above 0: PowerSGD
  std::vector<at::Tensor> buffers;
  std::vector<std::string> hosts;    // by rank, the key of its host; empty: unknown
  std::vector<std::string> sockets;  // by rank; empty: ranks of a host do not sum first
};

// The line about a late rank goes to stderr from a thread of the core: no Python there.
void print_late(const std::string& line) { std::fprintf(stderr, "tradewind: %s\n", line.c_str()); }

std::unique_ptr<SharedGradients> make(std::vector<at::Tensor> parameters,
                                      std::vector<std::string> names, const py::object& backend,
                                      const py::object& store, const std::string& prefix,
                                      const ShareOptions& options) {
  SharedGradients::Options made;
  made.plan = {options.bucket_bytes, options.end_bucket_bytes, options.piece_bytes};
  made.exchange.codec = codec_named(options.codec);
  made.exchange.error_feedback = options.error_feedback;
  made.exchange.window_bytes = options.window_bytes;
  made.exchange.patience = milliseconds(static_cast<std::int64_t>(options.patience_s * 1e3));
  made.exchange.deadline = milliseconds(static_cast<std::int64_t>(options.deadline_s * 1e3));
  made.sums_microbatches = options.sums_microbatches;
  made.measures = options.measures;
  made.settles_itself = options.settles_itself;
  made.shards_update = options.shards_update;
  made.low_rank = options.low_rank;
  made.buffers = options.buffers;
  made.exchange.hosts = Hosts::make(options.hosts);
  made.sockets = options.sockets;
  made.on_late = print_late;
  made.throw_through_autograd = throw_through_autograd;
  auto peers = make_c10d_peers(owned<c10d::Backend>(backend));
  auto board = make_c10d_board(owned<c10d::Store>(store), peers->rank(), prefix);
  const py::gil_scoped_release release;
  return std::make_unique<SharedGradients>(std::move(parameters), std::move(names),
                                           std::move(peers), std::move(board), made);
}

using FeedbackByName = std::map<std::string, at::Tensor>;

FeedbackByName feedback_of(SharedGradients& shared) {
  FeedbackByName found;
  for (const SharedGradients::Feedback& one : shared.feedback()) {
    const auto size = static_cast<std::int64_t>(one.values.size());
    found.emplace(one.name, at::from_blob(one.values.data(), {size}, at::kFloat).clone());
  }
  return found;
}

void load_feedback(SharedGradients& shared, const FeedbackByName& values) {
  const auto wanted = shared.feedback();
  for (const auto& one : wanted) {
    const auto given = values.find(one.name);
    const bool fits = given != values.end() && given->second.scalar_type() == at::kFloat &&
                      given->second.is_contiguous() &&
                      given->second.numel() == static_cast<std::int64_t>(one.values.size());
    if (!fits || values.size() != wanted.size()) {
      fail(ErrorKind::kBadValue, "feedback '", one.name, "': expected ", one.values.size(),
           " float32 values, and ", wanted.size(), " names in all, got other ones; it belongs to ",
           "another model, codec, world size or bucket_mb");
    }
  }
  for (const auto& one : wanted) {
    std::copy_n(values.at(one.name).const_data_ptr<float>(), one.values.size(), one.values.data());
  }
}

}  // namespace

void register_share(py::module_& module) {
  py::class_<ShareOptions>(module, "ShareOptions")
      .def(py::init<>())
      .def_readwrite("codec", &ShareOptions::codec)
      .def_readwrite("error_feedback", &ShareOptions::error_feedback)
      .def_readwrite("bucket_bytes", &ShareOptions::bucket_bytes)
      .def_readwrite("end_bucket_bytes", &ShareOptions::end_bucket_bytes)
      .def_readwrite("piece_bytes", &ShareOptions::piece_bytes)
      .def_readwrite("window_bytes", &ShareOptions::window_bytes)
      .def_readwrite("patience_s", &ShareOptions::patience_s)
      .def_readwrite("deadline_s", &ShareOptions::deadline_s)
      .def_readwrite("sums_microbatches", &ShareOptions::sums_microbatches)
      .def_readwrite("measures", &ShareOptions::measures)
      .def_readwrite("settles_itself", &ShareOptions::settles_itself)
      .def_readwrite("shards_update", &ShareOptions::shards_update)
      .def_readwrite("low_rank", &ShareOptions::low_rank)
      .def_readwrite("buffers", &ShareOptions::buffers)
      .def_readwrite("hosts", &ShareOptions::hosts)
      .def_readwrite("sockets", &ShareOptions::sockets);
  py::class_<SharedGradients::NonFinite>(module, "NonFiniteGradient")
      .def_readonly("rank", &SharedGradients::NonFinite::rank)
      .def_readonly("parameter_name", &SharedGradients::NonFinite::parameter_name)
      .def_readonly("microbatch", &SharedGradients::NonFinite::microbatch)
      .def_readonly("num_parameters", &SharedGradients::NonFinite::num_parameters);
  py::class_<Exchange::Statistics>(module, "ExchangeStatistics")
      .def_readonly("num_rounds", &Exchange::Statistics::num_rounds)
      .def_readonly("sent_bytes", &Exchange::Statistics::sent_bytes)
      .def_readonly("between_hosts_bytes", &Exchange::Statistics::between_hosts_bytes)
      .def_readonly("waited_s", &Exchange::Statistics::waited_s)
      .def_readonly("busy_s", &Exchange::Statistics::busy_s);

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  using Shared = SharedGradients;
  py::class_<Shared> shared(module, "SharedGradients");
  shared
      .def(py::init(&make), py::arg("parameters"), py::arg("names"), py::arg("backend"),
           py::arg("store"), py::arg("prefix"), py::arg("options"))
      .def("install_hooks", &Shared::install_hooks)
      .def("remove_hooks", &Shared::remove_hooks)
      .def("open_backward", &Shared::open_backward)
      .def("is_backward_open", &Shared::is_backward_open)
      .def("set_syncing", &Shared::set_syncing)
      .def("is_syncing", &Shared::is_syncing)
      .def("set_divide_by_all", &Shared::set_divide_by_all)
      .def("end_microbatch", &Shared::end_microbatch)
      .def("finish_backward", &Shared::finish_backward, py::arg("has_next") = true, unlocked)
      .def("shadow_round", &Shared::shadow_round, py::arg("has_next") = true, unlocked)
      .def("is_open", &Shared::is_open)
      .def("settle", &Shared::settle, unlocked)
      .def("settle_bucket", &Shared::settle_bucket, unlocked)
      .def("is_mean_final", &Shared::is_mean_final, unlocked)
      .def("assign_gradients", &Shared::assign_gradients, unlocked)
      .def("set_deferred", &Shared::set_deferred)
      .def("scale", &Shared::scale)
      .def("abandon", &Shared::abandon, unlocked)
      .def("nonfinite", &Shared::nonfinite, unlocked)
      .def("num_contributors_next", &Shared::num_contributors_next, unlocked)
      .def("bucket_of", &Shared::bucket_of)
      .def("parameters_of", &Shared::parameters_of)
      .def("num_buckets", [](const Shared& self) { return self.plan().buckets().size(); })
      .def("set_forward_order", &Shared::set_forward_order)
      .def("take_buffers", &Shared::take_buffers, unlocked)
      .def("feedback", &feedback_of,
           "name -> float32 values: what a lossy codec still owes. Between rounds.")
      .def("load_feedback", &load_feedback,
           "As feedback() gave it. Raises ValueError, and changes nothing, where names or sizes "
           "differ.")
      .def("use_all", &Shared::use_all)
      .def("mean", &Shared::mean)
      .def(
          "fragments",
          [](const Shared& self) {
            std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> found;
            for (const auto& one : self.fragments()) {
              found.emplace_back(one.parameter_idx, one.begin, one.end);
            }
            return found;
          },
          "(parameter, first element, end) of each run that this rank updates.")
      .def(
          "set_shards",
          [](Shared& self, StateTable<OptimizerTable>& table,
             std::vector<std::size_t> table_idx_of_fragment) {
            self.set_shards(table, std::move(table_idx_of_fragment));
          },
          py::keep_alive<1, 2>())
      .def(
          "release",
          [](Shared& self, const std::vector<GroupTuple>& groups, double multiplier,
             bool is_vetoed) {
            const py::gil_scoped_release unlock;
            self.release(group_options(groups), multiplier, is_vetoed);
          },
          py::arg("groups"), py::arg("gradient_multiplier"), py::arg("is_vetoed") = false)
      .def(
          "give_measures",
          [](Shared& self, StateTable<OptimizerTable>& table,
             const std::vector<std::int64_t>& table_idx_of) {
            self.give_measures(table.hot_measure(), table_idx_of);
          },
          unlocked)
      .def("tell", [](Shared& self, std::string text) { self.exchange().tell(std::move(text)); })
      .def(
          "fail", [](Shared& self, const std::string& why) { self.exchange().fail_with(why); },
          unlocked)
      .def("statistics", [](Shared& self) { return self.exchange().statistics(); })
      .def("memory_bytes", &Shared::memory_bytes)
      .def("digest", [](const Shared& self) { return self.layout().digest(); });
  refuse_copies(shared, "SharedGradients");
}

}  // namespace tradewind::bindings
