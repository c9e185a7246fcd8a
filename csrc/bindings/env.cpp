#include "base/env.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <utility>

#include "base/crc32c.h"
#include "base/recording_env.h"
#include "bindings/path.h"
#include "bindings/register.h"

namespace tradewind::bindings {
namespace py = pybind11;
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

class FileLock {
 public:
  explicit FileLock(std::unique_ptr<File> file) : file_(std::move(file)) {}
  void release() noexcept { file_.reset(); }

 private:
  std::unique_ptr<File> file_;
};

void register_files(py::module_& module) {
  py::class_<FileStatus>(module, "FileStatus")
      .def_readonly("size_bytes", &FileStatus::size_bytes)
      .def_readonly("num_links", &FileStatus::num_links)
      .def_readonly("is_directory", &FileStatus::is_directory)
      .def_readonly("is_file", &FileStatus::is_file)
      .def_readonly("modified_s", &FileStatus::modified_s, "Since the epoch.")
      .def_property_readonly(
          "file_id",
          [](const FileStatus& status) { return std::pair(status.device, status.inode); },
          "Device and inode: equal for two names of one file, as long as it lives.");
  py::class_<FileLock>(module, "FileLock",
                       "A lock on a file, until it is released or its process "
                       "ends; forked children do not have it.")
      .def("release", &FileLock::release, NoGil(), "Idempotent.")
      .def(
          "__enter__", [](FileLock& self) -> FileLock& { return self; },
          py::return_value_policy::reference)
      .def("__exit__", [](FileLock& lock, const py::args&) { lock.release(); });
}

void register_env_class(py::module_& module) {
  py::class_<Env, std::shared_ptr<Env>>(
      module, "Env",
      "A file system; all methods raise OSError with errno and filename, and release the GIL.")
      .def(
          "make_directory", [](Env& env, const Path& path) { env.make_directory(path.bytes); },
          py::arg("path"), NoGil(), "One level; FileExistsError where the name is taken.")
      .def(
          "make_directories", [](Env& env, const Path& path) { env.make_directories(path.bytes); },
          py::arg("path"), NoGil(), "What is missing of it; syncs each new directory's parent.")
      .def(
          "rename",
          [](Env& env, const Path& old, const Path& new_path) {
            env.rename(old.bytes, new_path.bytes);
          },
          py::arg("old"), py::arg("new"), NoGil(), "Replaces what has the new name.")
      .def(
          "remove", [](Env& env, const Path& path) { env.remove(path.bytes); }, py::arg("path"),
          NoGil(), "A file's name.")
      .def(
          "remove_directory", [](Env& env, const Path& path) { env.remove_directory(path.bytes); },
          py::arg("path"), NoGil(), "An empty one.")
      .def(
          "sync_directory", [](Env& env, const Path& path) { env.sync_directory(path.bytes); },
          py::arg("path"), NoGil(),
          "What was made, renamed and removed in it is on stable storage after this.")
      .def(
          "list_directory",
          [](Env& env, const Path& path) {
            std::vector<std::string> names;
            {
              const py::gil_scoped_release release;
              names = env.list_directory(path.bytes);
            }
            std::vector<py::str> texts;
            for (const std::string& name : names) texts.push_back(decoded_path(name));
            return texts;
          },
          py::arg("path"), "Sorted names, by bytes.")
      .def(
          "status", [](Env& env, const Path& path) { return env.status(path.bytes); },
          py::arg("path"), NoGil(), "None where there is nothing of this name.")
      .def(
          "read_file",
          [](Env& env, const Path& path, std::int64_t max_bytes) {
            std::string data;
            {
              const py::gil_scoped_release release;
              data = env.read_file(path.bytes, max_bytes);
            }
            return py::bytes(data);
          },
          py::arg("path"), py::arg("max_bytes"), "OSError with EFBIG where it is larger.")
      .def(
          "write_file",
          [](Env& env, const Path& path, const py::bytes& data, bool exclusive, bool sync) {
            const std::string_view view = data;
            const py::gil_scoped_release release;
            env.write_file(path.bytes, view, {.exclusive = exclusive, .sync = sync});
          },
          py::arg("path"), py::arg("data"), py::arg("exclusive") = false, py::arg("sync") = true,
          "Creates, or empties and fills; exclusive: FileExistsError where the name is taken. Its "
          "directory is not synced, and what a failure leaves is not removed.")
      .def(
          "lock_file",
          [](Env& env, const Path& path, bool exclusive) -> std::optional<FileLock> {
            std::unique_ptr<File> file =
                env.lock_file(path.bytes, exclusive ? LockKind::kExclusive : LockKind::kShared);
            if (!file) return std::nullopt;
            return FileLock(std::move(file));
          },
          py::arg("path"), py::arg("exclusive"), NoGil(),
          "Never waits; None where another open file holds it. An exclusive lock makes a missing "
          "file, a shared one raises FileNotFoundError.");
  module.def(
      "posix_env", [] { return std::shared_ptr<Env>(&posix_env(), [](Env*) {}); },
      "The system's own file system; one a process.");
}

using Row = py::typing::Dict<py::str, py::object>;

Row to_row(const Operation& operation) {
  Row row;
  row["kind"] = name_of(operation.kind);
  row["path"] = decoded_path(operation.path);
  row["to"] = decoded_path(operation.to);
  row["file"] = operation.file;
  row["offset"] = operation.offset;
  row["size_bytes"] = operation.size_bytes;
  row["data"] = py::bytes(operation.data);
  row["error"] = operation.error;
  return row;
}

void register_recording_env(py::module_& module) {
  py::class_<RecordingEnv, Env, std::shared_ptr<RecordingEnv>>(
      module, "RecordingEnv",
      "The POSIX file system with a record of every call that changes something, and chosen ones "
      "failing: for tests of crashes.")
      .def(py::init([](bool keep_data) {
             return std::make_shared<RecordingEnv>(posix_env(), keep_data);
           }),
           py::arg("keep_data") = true)
      .def(
          "operations",
          [](const RecordingEnv& env) {
            std::vector<Row> rows;
            for (const Operation& operation : env.operations()) rows.push_back(to_row(operation));
            return rows;
          },
          "In the order in which they took effect. kind: create, open (to write), write, truncate, "
          "allocate, sync, rename, remove, make_directory, remove_directory, sync_directory, lock. "
          "path; to (of a rename); file: the file itself by whatever name, never used again, -1 "
          "where there was none; offset: where a write or allocation begins, the new size of a "
          "truncation; size_bytes and data written; error: an errno, or 0.")
      .def("clear", &RecordingEnv::clear, "Forgets the operations, not the faults.")
      .def(
          "inject",
          [](RecordingEnv& env, std::int64_t index, int error, std::int64_t short_bytes,
             bool sticky) {
            env.inject(index, {.error = error, .short_bytes = short_bytes, .is_sticky = sticky});
          },
          py::arg("index"), py::arg("error") = 0, py::arg("short_bytes") = 0,
          py::arg("sticky") = false,
          "The index-th recorded call from now on, from 0, fails with this errno and does nothing; "
          "or, where it is a write, stops after short_bytes (with both: and then fails). sticky: "
          "all later ones too, until heal(); not EINTR.")
      .def("heal", &RecordingEnv::heal, "No faults from now on.")
      .def("drop_syncs", &RecordingEnv::drop_syncs, py::arg("files"), py::arg("directories"),
           "Syncs of these succeed, and are neither done nor recorded.")
      .def("refuse_direct", &RecordingEnv::refuse_direct, py::arg("refuse"),
           "Files are buffered, as on a file system without direct I/O.");
}

}  // namespace

void register_env(py::module_& module) {
  register_files(module);
  register_env_class(module);
  register_recording_env(module);
  module.def(
      "crc32c",
      [](const py::bytes& data, std::uint32_t crc) {
        const std::string_view view = data;
        const py::gil_scoped_release release;
        return crc32c(crc, view.data(), static_cast<std::int64_t>(view.size()));
      },
      py::arg("data"), py::arg("crc") = 0,
      "CRC-32C (RFC 3720) of these bytes, after those that `crc` is the sum of.");
  module.def(
      "crc32c_combine",
      [](std::uint32_t first, std::uint32_t second, std::int64_t second_bytes) {
        if (second_bytes < 0) {
          fail(ErrorKind::kBadValue, "crc32c_combine: expected 0 bytes or more, got ",
               second_bytes);
        }
        return crc32c_combine(first, second, second_bytes);
      },
      py::arg("first"), py::arg("second"), py::arg("second_bytes"),
      "CRC-32C of two runs of bytes one after the other, from their own and the second's size.");
}

}  // namespace tradewind::bindings
