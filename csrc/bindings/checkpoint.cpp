#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arena/gate.h"
#include "base/error.h"
#include "bindings/path.h"
#include "bindings/register.h"
#include "checkpoint/shard_reader.h"
#include "checkpoint/shard_writer.h"

namespace tradewind::bindings {
namespace py = pybind11;
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Address = std::uintptr_t;

// SAFETY: callers give addresses of memory that they keep, as the docstrings ask.
void* at(Address address) { return reinterpret_cast<void*>(address); }

std::chrono::steady_clock::time_point deadline_in(double timeout_s) {
  constexpr double kLongestS = 1e9;  // beyond it the clock's ticks would overflow
  if (std::isnan(timeout_s)) fail(ErrorKind::kBadValue, "timeout_s: expected seconds, got NaN");
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(std::clamp(timeout_s, 0.0, kLongestS)));
}

std::shared_ptr<GateClosing> close_gate(
    const std::vector<std::pair<Address, std::int64_t>>& ranges) {
  std::vector<MemoryRange> typed;
  for (const auto& [address, size_bytes] : ranges) typed.push_back({at(address), size_bytes});
  return memory_gate().close(typed);
}

void wait_for_gate(Address address, std::int64_t size_bytes, double timeout_s) {
  const auto deadline = deadline_in(timeout_s);
  const py::gil_scoped_release release;
  if (memory_gate().wait_until(at(address), size_bytes, deadline)) return;
  fail(ErrorKind::kBadState, "gate: expected ", size_bytes, " bytes at ", at(address),
       " to be handed over within ", timeout_s,
       " s, they are still being saved; wait longer, or cancel the save");
}

void register_gate(py::module_& module) {
  py::class_<GateClosing, std::shared_ptr<GateClosing>> closing(
      module, "GateClosing",
      "Ranges of memory that no sweep may write until they are opened, at the latest when this is "
      "let go.");
  closing.def("open", &GateClosing::open, NoGil(), "All of what is left. Idempotent.")
      .def_property_readonly("waited_s", &GateClosing::waited_s,
                             "Seconds for which at least one thread has waited for these ranges.")
      .def_property_readonly("held_bytes", &GateClosing::held_bytes);
  refuse_copies(closing, "GateClosing");
  module.def("close_gate", &close_gate, py::arg("ranges"),
             "ranges: (address, size in bytes). Sweeps and native writers wait for them from now "
             "on; no sweep may be under way. ValueError for a negative size.");
  module.def("wait_for_gate", &wait_for_gate, py::arg("address"), py::arg("size_bytes"),
             py::arg("timeout_s"),
             "Until the memory may be written; for writers other than sweeps. RuntimeError at the "
             "deadline.");
}

using Region = std::tuple<std::int64_t, Address, std::int64_t>;

std::unique_ptr<ShardWrite> start(ShardWriter& writer, std::shared_ptr<Env> env, const Path& path,
                                  const py::bytes& header, const std::vector<Region>& regions,
                                  std::int64_t block_bytes, bool recycle,
                                  std::optional<std::shared_ptr<GateClosing>> closing) {
  ShardWriter::Request request{std::move(env),
                               path.bytes,
                               header,
                               {},
                               block_bytes,
                               recycle,
                               std::move(closing).value_or(nullptr)};
  for (const auto& [offset, address, size_bytes] : regions) {
    request.regions.push_back({offset, at(address), size_bytes});
  }
  const py::gil_scoped_release release;
  return writer.start(std::move(request));
}

void register_writer(py::module_& module) {
  py::class_<ShardResult>(module, "ShardResult")
      .def_readonly("size_bytes", &ShardResult::size_bytes)
      .def_readonly("crc32c", &ShardResult::crc32c, "Of the whole file.")
      .def_property_readonly(
          "block_crc32c",
          [](const ShardResult& result) {
            std::string packed;
            for (const std::uint32_t crc : result.block_crc32c) {
              for (unsigned shift = 0; shift < 32; shift += 8) {
                packed.push_back(static_cast<char>(crc >> shift & 0xFFU));
              }
            }
            return py::bytes(packed);
          },
          "u32 little-endian, one for each block of the file.");

  py::class_<ShardWrite> write(module, "ShardWrite", "A save under way.");
  write
      .def(
          "wait",
          [](const ShardWrite& self, double timeout_s) {
            const auto deadline = deadline_in(timeout_s);
            const py::gil_scoped_release release;
            return self.wait_until(deadline);
          },
          py::arg("timeout_s"), "Whether it is over, well or not.")
      .def("result", &ShardWrite::result, NoGil(),
           "After wait(): the file is on stable storage, its name is not (sync the directory). "
           "Raises what ended it: OSError with errno and filename, ECANCELED after cancel().")
      .def("cancel", &ShardWrite::cancel, NoGil(),
           "Opens the gate and ends it as soon as calls under way return; does not wait.");
  refuse_copies(write, "ShardWrite");

  py::class_<ShardWriter> writer(module, "ShardWriter",
                                 "A pool of threads that writes one shard file at a time.");
  writer.def(py::init<int>(), py::arg("num_threads") = 16)
      .def("start", &start, py::arg("env"), py::arg("path"), py::arg("header"), py::arg("regions"),
           py::arg("block_bytes") = ShardWriter::Request{}.block_bytes, py::arg("recycle") = false,
           py::arg("closing").none(true) = py::none(),
           "header: whole pages of 4096 bytes, at offset 0. regions: (file offset, a multiple of "
           "4096; address; size in bytes), ascending; between them and up to the next page the "
           "file is zero. The memory stays valid until the save is over, and unchanged until "
           "`closing` lets it go. recycle: the file is there and is overwritten in place. Raises "
           "ValueError for other offsets, RuntimeError while another save is under way.")
      .def("close", &ShardWriter::close, NoGil(),
           "Cancels what is under way and ends the threads. Idempotent.");
  refuse_copies(writer, "ShardWriter");
}

std::vector<std::uint32_t> unpack_checksums(std::string_view packed) {
  if (packed.size() % 4 != 0) {
    fail(ErrorKind::kBadValue, "block_crc32c: expected four bytes for each block, got ",
         packed.size(), " bytes");
  }
  std::vector<std::uint32_t> sums;
  for (std::size_t i = 0; i < packed.size(); i += 4) {
    std::uint32_t sum = 0;
    for (unsigned byte = 0; byte < 4; ++byte) {
      sum |= std::uint32_t{static_cast<unsigned char>(packed[i + byte])} << 8U * byte;
    }
    sums.push_back(sum);
  }
  return sums;
}

using Target = std::tuple<std::int64_t, std::int64_t, Address>;

void read(const std::shared_ptr<Env>& env, const Path& path, std::int64_t size_bytes,
          std::int64_t block_bytes, const py::bytes& block_crc32c,
          const std::vector<Target>& targets, int num_threads, bool verify_all) {
  ShardRequest request{path.bytes, size_bytes,  block_bytes, unpack_checksums(block_crc32c),
                       {},         num_threads, verify_all};
  for (const auto& [offset, target_bytes, address] : targets) {
    request.targets.push_back({offset, target_bytes, at(address)});
  }
  const py::gil_scoped_release release;
  read_shard(*env, request);
}

}  // namespace

void register_checkpoint(py::module_& module) {
  register_gate(module);
  register_writer(module);
  module.def("read_shard", &read, py::arg("env"), py::arg("path"), py::arg("size_bytes"),
             py::arg("block_bytes"), py::arg("block_crc32c"), py::arg("targets"),
             py::arg("num_threads") = 8, py::arg("verify_all") = false,
             "targets: (file offset, size in bytes, address), in any order; the same part may be "
             "wanted in several places. Reads and checks the blocks that they touch (verify_all: "
             "all blocks). Raises DamagedCheckpointError naming the file and the block or size, "
             "OSError (BlockingIOError where the file is being overwritten), ValueError for "
             "targets outside the file. After an error targets may hold anything.");
}

}  // namespace tradewind::bindings
