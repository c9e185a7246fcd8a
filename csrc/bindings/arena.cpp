#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <tuple>

#include "arena/layout.h"
#include "base/error.h"
#include "bindings/register.h"
#include "torch/parameter_arena.h"

namespace tradewind::bindings {
namespace {

namespace py = pybind11;

DType dtype_of(const std::string& name) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (dtype_name(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  fail(ErrorKind::kBadValue, "dtype '", name,
       "': expected a torch dtype's name that an arena holds");
}

Layout make_layout(
    const std::vector<std::tuple<std::string, std::vector<std::int64_t>, std::string>>& specs,
    std::int64_t slot_alignment_bytes, std::int64_t arena_alignment_bytes,
    std::int64_t bucket_bytes) {
  std::vector<SlotSpec> typed;
  for (const auto& [name, shape, dtype] : specs) typed.push_back({name, shape, dtype_of(dtype)});
  return Layout::make(typed, {slot_alignment_bytes, arena_alignment_bytes, bucket_bytes});
}

void register_layout(py::module_& module) {
  const LayoutOptions defaults;
  py::class_<Slot>(module, "Slot")
      .def_readonly("name", &Slot::name)
      .def_readonly("shape", &Slot::shape)
      .def_property_readonly("dtype",
                             [](const Slot& s) { return std::string(dtype_name(s.dtype)); })
      .def_readonly("arena_idx", &Slot::arena_idx)
      .def_readonly("offset_bytes", &Slot::offset_bytes)
      .def_readonly("num_elements", &Slot::num_elements)
      .def_property_readonly("size_bytes", &Slot::size_bytes);
  py::class_<Bucket>(module, "Bucket")
      .def_readonly("arena_idx", &Bucket::arena_idx)
      .def_readonly("first_slot_idx", &Bucket::first_slot_idx)
      .def_readonly("num_slots", &Bucket::num_slots)
      .def_readonly("num_norm_blocks", &Bucket::num_norm_blocks)
      .def_property_readonly("range_bytes", [](const Bucket& b) {
        return std::make_pair(b.range.begin_bytes, b.range.end_bytes);
      });
  py::class_<Layout> layout(module, "Layout");
  layout
      .def(py::init(&make_layout), py::arg("specs"), py::kw_only(),
           py::arg("slot_alignment_bytes") = defaults.slot_alignment_bytes,
           py::arg("arena_alignment_bytes") = defaults.arena_alignment_bytes,
           py::arg("bucket_bytes") = defaults.bucket_bytes,
           "specs: (name, shape, dtype name) of each parameter in registration order.")
      .def_property_readonly("slots", &Layout::slots)
      .def_property_readonly("buckets", &Layout::buckets)
      .def_property_readonly("arena_bytes",
                             [](const Layout& self) {
                               std::vector<std::pair<std::string, std::int64_t>> arenas;
                               for (const ArenaSpec& arena : self.arenas()) {
                                 arenas.emplace_back(dtype_name(arena.dtype), arena.size_bytes);
                               }
                               return arenas;
                             })
      .def(
          "shard",
          [](const Layout& self, std::int64_t bucket_idx, std::int64_t rank,
             std::int64_t world_size) {
            const ByteRange range = self.shard(bucket_idx, rank, world_size);
            return std::make_pair(range.begin_bytes, range.end_bytes);
          },
          py::arg("bucket_idx"), py::arg("rank"), py::arg("world_size"))
      .def_property_readonly("digest", &Layout::digest);
  module.attr("NORM_BLOCK_ELEMENTS") = kNormBlockElements;
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
}

std::vector<std::int64_t> bring_home(ParameterArena& arena) {
  if (!memory_gate().is_open()) {
    const py::gil_scoped_release release;
    arena.wait_to_bring_home();
  }
  return arena.bring_home();
}

}  // namespace

void register_arena(py::module_& module) {
  register_layout(module);
  py::class_<ParameterArena> arena(module, "ParameterArena");
  arena
      .def(py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names) {
             return std::make_unique<ParameterArena>(std::move(parameters), std::move(names),
                                                     LayoutOptions{});
           }),
           py::arg("parameters"), py::arg("names"))
      .def("bring_home", &bring_home,
           "Copies parameters whose memory left the arena back in; returns their indices.")
      .def_property_readonly("layout", &ParameterArena::layout,
                             py::return_value_policy::reference_internal)
      .def_property_readonly("size_bytes", &ParameterArena::size_bytes)
      .def(
          "memory_ranges", [](const ParameterArena& self) { return addresses_of(self.memory()); },
          "(address, size in bytes) of each arena in host memory; [] where they are a device's.");
  refuse_copies(arena, "ParameterArena");
}

}  // namespace tradewind::bindings
