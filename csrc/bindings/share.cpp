// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/error.h"
#include "bindings/c10d.h"
#include "bindings/register.h"
#include "bindings/state_tables.h"
#include "torch/c10d_peers.h"
#include "torch/optimizer_table.h"
#include "torch/shared_gradients.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;

struct ShareOptions : RoundOptions {
  std::int64_t piece_bytes = PlanOptions{}.piece_bytes;
  std::int64_t window_bytes = Exchange::Options{}.window_bytes;
  bool measures = false;
  bool shards_update = false;
  std::int64_t low_rank = 0;         // above 0: PowerSGD
  std::vector<std::string> hosts;    // by rank, the key of its host; empty: unknown
  std::vector<std::string> sockets;  // by rank; empty: ranks of a host do not sum first
};

std::unique_ptr<SharedGradients> make(std::vector<at::Tensor> parameters,
                                      std::vector<std::string> names, const py::object& backend,
                                      const py::object& store, const std::string& prefix,
                                      const ShareOptions& options) {
  SharedGradients::Options made;
  options.fill(made);
  made.plan.piece_bytes = options.piece_bytes;
  made.exchange.codec = codec_named(options.codec);
  made.exchange.error_feedback = options.error_feedback;
  made.exchange.window_bytes = options.window_bytes;
  made.exchange.patience = to_milliseconds(options.patience_s);
  made.exchange.deadline = to_milliseconds(options.deadline_s);
  made.measures = options.measures;
  made.shards_update = options.shards_update;
  made.low_rank = options.low_rank;
  made.exchange.hosts = Hosts::make(options.hosts);
  made.sockets = options.sockets;
  auto peers = make_c10d_peers(owned<c10d::Backend>(backend));
  auto board = make_c10d_board(owned<c10d::Store>(store), peers->rank(), prefix);
  const py::gil_scoped_release release;
  return std::make_unique<SharedGradients>(std::move(parameters), std::move(names),
                                           std::move(peers), std::move(board), made);
}

using FeedbackByName = std::map<std::string, at::Tensor>;

FeedbackByName feedback_of(GradientRounds& rounds) {
  FeedbackByName found;
  for (const auto& [name, there] : rounds.feedback()) found.emplace(name, there.cpu().clone());
  return found;
}

void load_feedback(GradientRounds& rounds, const FeedbackByName& values) {
  FeedbackByName wanted = rounds.feedback();
  for (const auto& [name, there] : wanted) {
    const auto given = values.find(name);
    const bool fits = given != values.end() && given->second.scalar_type() == at::kFloat &&
                      given->second.is_contiguous() && given->second.sizes() == there.sizes();
    if (!fits || values.size() != wanted.size()) {
      fail(ErrorKind::kBadValue, "feedback '", name, "': expected ", there.numel(),
           " float32 values, and ", wanted.size(), " names in all, got other ones; it belongs to ",
           "another model, codec, world size or bucket_mb");
    }
  }
  for (auto& [name, there] : wanted) there.copy_(values.at(name));
}

void register_rounds(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  using Rounds = GradientRounds;
  py::class_<Rounds> rounds(module, "GradientRounds");
  rounds.def("install_hooks", &Rounds::install_hooks)
      .def("remove_hooks", &Rounds::remove_hooks)
      .def("open_backward", &Rounds::open_backward)
      .def("is_backward_open", &Rounds::is_backward_open)
      .def("set_syncing", &Rounds::set_syncing)
      .def("is_syncing", &Rounds::is_syncing)
      .def("set_divide_by_all", &Rounds::set_divide_by_all)
      .def("end_microbatch", &Rounds::end_microbatch, unlocked)
      .def("finish_backward", &Rounds::finish_backward, py::arg("has_next") = true, unlocked)
      .def("shadow_round", &Rounds::shadow_round, py::arg("has_next") = true, unlocked)
      .def("is_open", &Rounds::is_open)
      .def("settle", &Rounds::settle, unlocked)
      .def("scale", &Rounds::scale)
      .def("abandon", &Rounds::abandon, unlocked)
      .def("nonfinite", &Rounds::nonfinite, unlocked)
      .def("num_contributors_next", &Rounds::num_contributors_next, unlocked)
      .def("set_wishes", &Rounds::set_wishes)
      .def("wishes", &Rounds::wishes, unlocked,
           "All ranks' of the newest round, which it waits for: the same on each.")
      .def("bucket_of", &Rounds::bucket_of)
      .def("parameters_of", &Rounds::parameters_of)
      .def("num_buckets", [](const Rounds& self) { return self.plan().buckets().size(); })
      .def("take_buffers", &Rounds::take_buffers, unlocked)
      .def("feedback", &feedback_of,
           "name -> float32 values: what a lossy codec still owes. Between rounds.")
      .def("load_feedback", &load_feedback,
           "As feedback() gave it. Raises ValueError, and changes nothing, where names or sizes "
           "differ.")
      .def("use_all", &Rounds::use_all)
      .def("mean", &Rounds::mean)
      .def("tell", &Rounds::tell)
      .def("fail", &Rounds::fail_with, unlocked)
      .def("leave", &Rounds::leave, unlocked)
      .def("statistics", &Rounds::statistics)
      .def("memory_bytes", &Rounds::memory_bytes)
      .def("digest", [](const Rounds& self) { return self.layout().digest(); });
  refuse_copies(rounds, "GradientRounds");
}

}  // namespace

void register_share(py::module_& module) {
  py::class_<RoundOptions>(module, "RoundOptions")
      .def_readwrite("codec", &RoundOptions::codec)
      .def_readwrite("error_feedback", &RoundOptions::error_feedback)
      .def_readwrite("bucket_bytes", &RoundOptions::bucket_bytes)
      .def_readwrite("end_bucket_bytes", &RoundOptions::end_bucket_bytes)
      .def_readwrite("patience_s", &RoundOptions::patience_s)
      .def_readwrite("deadline_s", &RoundOptions::deadline_s)
      .def_readwrite("sums_microbatches", &RoundOptions::sums_microbatches)
      .def_readwrite("settles_itself", &RoundOptions::settles_itself)
      .def_readwrite("buffers", &RoundOptions::buffers);
  py::class_<ShareOptions, RoundOptions>(module, "ShareOptions")
      .def(py::init<>())
      .def_readwrite("piece_bytes", &ShareOptions::piece_bytes)
      .def_readwrite("window_bytes", &ShareOptions::window_bytes)
      .def_readwrite("measures", &ShareOptions::measures)
      .def_readwrite("shards_update", &ShareOptions::shards_update)
      .def_readwrite("low_rank", &ShareOptions::low_rank)
      .def_readwrite("hosts", &ShareOptions::hosts)
      .def_readwrite("sockets", &ShareOptions::sockets);
  py::class_<GradientRounds::NonFinite>(module, "NonFiniteGradient")
      .def_readonly("rank", &GradientRounds::NonFinite::rank)
      .def_readonly("parameter_name", &GradientRounds::NonFinite::parameter_name)
      .def_readonly("microbatch", &GradientRounds::NonFinite::microbatch)
      .def_readonly("num_parameters", &GradientRounds::NonFinite::num_parameters);
  py::class_<Exchange::Statistics>(module, "ExchangeStatistics")
      .def_readonly("num_rounds", &Exchange::Statistics::num_rounds)
      .def_readonly("sent_bytes", &Exchange::Statistics::sent_bytes)
      .def_readonly("between_hosts_bytes", &Exchange::Statistics::between_hosts_bytes)
      .def_readonly("waited_s", &Exchange::Statistics::waited_s)
      .def_readonly("busy_s", &Exchange::Statistics::busy_s);

  register_rounds(module);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  using Shared = SharedGradients;
  py::class_<Shared, GradientRounds> shared(module, "SharedGradients");
  shared
      .def(py::init(&make), py::arg("parameters"), py::arg("names"), py::arg("backend"),
           py::arg("store"), py::arg("prefix"), py::arg("options"))
      .def("settle_bucket", &Shared::settle_bucket, unlocked)
      .def("is_mean_final", &Shared::is_mean_final, unlocked)
      .def("assign_gradients", &Shared::assign_gradients, unlocked)
      .def("set_deferred", &Shared::set_deferred)
      .def("set_forward_order", &Shared::set_forward_order)
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
          unlocked);
  refuse_copies(shared, "SharedGradients");
}

}  // namespace tradewind::bindings
