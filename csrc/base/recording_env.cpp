#include "base/recording_env.h"

#include <cerrno>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"

namespace tradewind {

const char* name_of(OperationKind kind) {
  static constexpr const char* kNames[] = {
      "create", "open",   "write",          "truncate",         "allocate",       "sync",
      "rename", "remove", "make_directory", "remove_directory", "sync_directory", "lock"};
  return kNames[static_cast<int>(kind)];
}

// Everything below is called with `mutex` held, which is what puts the calls in an order.
class RecordingEnv::Record {
 public:
  explicit Record(bool keep_data) : keep_data_(keep_data) {}

  // Appends `operation` with the result of `call`, unless a fault stands in its place.
  template <class Call>
  int perform(Operation operation, const Call& call) {
    const Fault fault = next_fault();
    const int result = fault.error != 0 ? -fault.error : call(operation);
    operation.error = result < 0 ? -result : 0;
    operations.push_back(std::move(operation));
    return result;
  }

  std::int64_t write(Operation operation, const void* data, std::int64_t size_bytes,
                     const auto& call) {
    const Fault fault = next_fault();
    const bool is_cut = fault.short_bytes > 0 && fault.short_bytes < size_bytes;
    const bool is_tried = fault.error == 0 || fault.short_bytes > 0;
    std::int64_t moved = is_tried ? call(is_cut ? fault.short_bytes : size_bytes) : 0;
    if (moved > 0) {
      operation.size_bytes = moved;
      if (keep_data_) {
        operation.data.assign(static_cast<const char*>(data), static_cast<std::size_t>(moved));
      }
    }
    if (fault.error != 0) moved = -fault.error;
    operation.error = moved < 0 ? static_cast<int>(-moved) : 0;
    operations.push_back(std::move(operation));
    return moved;
  }

  void inject(std::int64_t index, const Fault& fault) {
    faults_.emplace(num_calls_ + index, fault);
  }

  void heal() {
    faults_.clear();
    sticky_.reset();
  }

  // Inode numbers are used again, so what is new gets a new id, and what is gone loses its own.
  std::int64_t new_id(const FileStatus& status) {
    return ids_[{status.device, status.inode}] = num_ids_++;
  }

  std::int64_t id_of(Env& env, const std::string& path) {
    FileStatus status;
    return env.status_once(path, status) == 0 ? id_of(status) : -1;
  }

  std::int64_t id_of(const FileStatus& status) {
    const auto known = ids_.find({status.device, status.inode});
    return known == ids_.end() ? new_id(status) : known->second;
  }

  void forget(const FileStatus& status) { ids_.erase({status.device, status.inode}); }

  std::mutex mutex;
  std::vector<Operation> operations;
  bool drops_file_syncs = false;
  bool drops_directory_syncs = false;
  bool refuses_direct = false;

 private:
  Fault next_fault() {
    const std::int64_t index = num_calls_++;
    const auto found = faults_.find(index);
    if (found == faults_.end()) return sticky_.value_or(Fault{});
    const Fault fault = found->second;
    faults_.erase(found);
    if (fault.is_sticky && fault.error != EINTR) sticky_ = fault;
    return fault;
  }

  bool keep_data_;
  std::int64_t num_calls_ = 0;
  std::multimap<std::int64_t, Fault> faults_;  // by the number of the call
  std::optional<Fault> sticky_;
  std::int64_t num_ids_ = 0;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::int64_t> ids_;  // by device and inode
};

namespace {

constexpr std::int64_t kDirectAlignment = 4096;

class RecordingFile final : public File {
 public:
  RecordingFile(std::unique_ptr<File> base, std::shared_ptr<RecordingEnv::Record> record,
                std::int64_t id, bool is_direct)
      : File(base->path()),
        base_(std::move(base)),
        record_(std::move(record)),
        id_(id),
        is_direct_(is_direct) {}

  std::int64_t pwrite(const void* data, std::int64_t size_bytes,
                      std::int64_t offset) noexcept override {
    const std::lock_guard lock(record_->mutex);
    return record_->write(operation(OperationKind::kWrite, offset, 0), data, size_bytes,
                          [&](std::int64_t allowed_bytes) {
                            return is_aligned(data, size_bytes, offset)
                                       ? base_->pwrite(data, allowed_bytes, offset)
                                       : -EINVAL;
                          });
  }

  std::int64_t pread(void* data, std::int64_t size_bytes, std::int64_t offset) noexcept override {
    return is_aligned(data, size_bytes, offset) ? base_->pread(data, size_bytes, offset) : -EINVAL;
  }

  int sync_once() noexcept override {
    const std::lock_guard lock(record_->mutex);
    if (record_->drops_file_syncs) return 0;
    return record_->perform(operation(OperationKind::kSync, 0, 0),
                            [&](Operation&) { return base_->sync_once(); });
  }

  int allocate_once(std::int64_t offset, std::int64_t size_bytes) noexcept override {
    const std::lock_guard lock(record_->mutex);
    return record_->perform(operation(OperationKind::kAllocate, offset, size_bytes),
                            [&](Operation&) { return base_->allocate_once(offset, size_bytes); });
  }

  int truncate_once(std::int64_t size_bytes) noexcept override {
    const std::lock_guard lock(record_->mutex);
    return record_->perform(operation(OperationKind::kTruncate, size_bytes, 0),
                            [&](Operation&) { return base_->truncate_once(size_bytes); });
  }

  int status_once(FileStatus& status) const noexcept override { return base_->status_once(status); }

  int try_lock_once(LockKind kind) noexcept override {
    const std::lock_guard lock(record_->mutex);
    return record_->perform(operation(OperationKind::kLock, 0, 0),
                            [&](Operation&) { return base_->try_lock_once(kind); });
  }

  [[nodiscard]] std::int64_t direct_alignment() const noexcept override {
    return is_direct_ ? kDirectAlignment : 0;
  }

 private:
  [[nodiscard]] Operation operation(OperationKind kind, std::int64_t offset,
                                    std::int64_t size_bytes) const {
    return {.kind = kind,
            .path = path(),
            .to = {},
            .file = id_,
            .offset = offset,
            .size_bytes = size_bytes,
            .data = {}};
  }

  [[nodiscard]] bool is_aligned(const void* data, std::int64_t size_bytes,
                                std::int64_t offset) const {
    return !is_direct_ || (reinterpret_cast<std::uintptr_t>(data) % kDirectAlignment == 0 &&
                           size_bytes % kDirectAlignment == 0 && offset % kDirectAlignment == 0);
  }

  std::unique_ptr<File> base_;
  std::shared_ptr<RecordingEnv::Record> record_;
  std::int64_t id_;
  bool is_direct_;
};

Operation named(OperationKind kind, const std::string& path, std::int64_t file) {
  return {.kind = kind, .path = path, .to = {}, .file = file, .data = {}};
}

}  // namespace

RecordingEnv::RecordingEnv(Env& base, bool keep_data)
    : base_(base), record_(std::make_shared<Record>(keep_data)) {}

std::vector<Operation> RecordingEnv::operations() const {
  const std::lock_guard lock(record_->mutex);
  return record_->operations;
}

void RecordingEnv::clear() {
  const std::lock_guard lock(record_->mutex);
  record_->operations.clear();
}

void RecordingEnv::inject(std::int64_t index, Fault fault) {
  if (index < 0 || fault.error < 0 || fault.short_bytes < 0 ||
      (fault.error == 0 && fault.short_bytes == 0)) {
    fail(ErrorKind::kBadValue,
         "injected fault: expected an index from 0 and a positive errno or number of bytes, got ",
         index, ", ", fault.error, " and ", fault.short_bytes);
  }
  const std::lock_guard lock(record_->mutex);
  record_->inject(index, fault);
}

void RecordingEnv::heal() {
  const std::lock_guard lock(record_->mutex);
  record_->heal();
}

void RecordingEnv::drop_syncs(bool files, bool directories) {
  const std::lock_guard lock(record_->mutex);
  record_->drops_file_syncs = files;
  record_->drops_directory_syncs = directories;
}

void RecordingEnv::refuse_direct(bool refuse) {
  const std::lock_guard lock(record_->mutex);
  record_->refuses_direct = refuse;
}

int RecordingEnv::open_to_write(const std::string& path, OpenMode mode, std::unique_ptr<File>& file,
                                std::int64_t& id) {
  FileStatus status;
  const bool is_there = base_.status_once(path, status) == 0;
  const bool truncates = mode == OpenMode::kCreateOrTruncate && is_there;
  const bool creates = mode != OpenMode::kWriteExisting && !truncates;
  const OperationKind kind = truncates ? OperationKind::kTruncate
                             : creates ? OperationKind::kCreate
                                       : OperationKind::kOpen;
  return record_->perform(named(kind, path, is_there ? record_->id_of(status) : -1),
                          [&](Operation& operation) {
                            const OpenMode asked = creates ? OpenMode::kCreateExclusive : mode;
                            int result = base_.open_once(path, {.mode = asked}, file);
                            if (result == 0) result = file->status_once(status);
                            if (result == 0) {
                              id = creates ? record_->new_id(status) : record_->id_of(status);
                              operation.file = id;
                            }
                            return result;
                          });
}

int RecordingEnv::open_once(const std::string& path, OpenOptions options,
                            std::unique_ptr<File>& file) {
  const std::lock_guard lock(record_->mutex);
  std::unique_ptr<File> opened;
  std::int64_t id = -1;
  int result = 0;
  if (options.mode == OpenMode::kRead) {
    FileStatus status;
    result = base_.open_once(path, {.mode = OpenMode::kRead}, opened);
    if (result == 0) result = opened->status_once(status);
    if (result == 0) id = record_->id_of(status);
  } else {
    result = open_to_write(path, options.mode, opened, id);
  }
  if (result < 0) return result;
  file = std::make_unique<RecordingFile>(std::move(opened), record_, id,
                                         options.direct && !record_->refuses_direct);
  return 0;
}

int RecordingEnv::make_directory_once(const std::string& path) {
  const std::lock_guard lock(record_->mutex);
  return record_->perform(named(OperationKind::kMakeDirectory, path, -1),
                          [&](Operation& operation) {
                            const int result = base_.make_directory_once(path);
                            FileStatus status;
                            if (result == 0 && base_.status_once(path, status) == 0) {
                              operation.file = record_->new_id(status);
                            }
                            return result;
                          });
}

int RecordingEnv::rename_once(const std::string& old_path, const std::string& new_path) {
  const std::lock_guard lock(record_->mutex);
  Operation operation = named(OperationKind::kRename, old_path, record_->id_of(base_, old_path));
  operation.to = new_path;
  return record_->perform(std::move(operation), [&](Operation& moved) {
    FileStatus replaced;
    const bool replaces = base_.status_once(new_path, replaced) == 0 &&
                          (replaced.is_directory || replaced.num_links <= 1) &&
                          record_->id_of(replaced) != moved.file;
    const int result = base_.rename_once(old_path, new_path);
    if (result == 0 && replaces) record_->forget(replaced);
    return result;
  });
}

int RecordingEnv::remove_once(const std::string& path) {
  const std::lock_guard lock(record_->mutex);
  return record_->perform(
      named(OperationKind::kRemove, path, record_->id_of(base_, path)), [&](Operation&) {
        FileStatus status;
        const bool is_last = base_.status_once(path, status) == 0 && status.num_links <= 1;
        const int result = base_.remove_once(path);
        if (result == 0 && is_last) record_->forget(status);
        return result;
      });
}

int RecordingEnv::remove_directory_once(const std::string& path) {
  const std::lock_guard lock(record_->mutex);
  return record_->perform(named(OperationKind::kRemoveDirectory, path, record_->id_of(base_, path)),
                          [&](Operation&) {
                            FileStatus status;
                            const bool is_there = base_.status_once(path, status) == 0;
                            const int result = base_.remove_directory_once(path);
                            if (result == 0 && is_there) record_->forget(status);
                            return result;
                          });
}

int RecordingEnv::sync_directory_once(const std::string& path) {
  const std::lock_guard lock(record_->mutex);
  if (record_->drops_directory_syncs) return 0;
  return record_->perform(named(OperationKind::kSyncDirectory, path, record_->id_of(base_, path)),
                          [&](Operation&) { return base_.sync_directory_once(path); });
}

int RecordingEnv::list_directory_once(const std::string& path, std::vector<std::string>& names) {
  return base_.list_directory_once(path, names);
}

int RecordingEnv::status_once(const std::string& path, FileStatus& status) {
  return base_.status_once(path, status);
}

}  // namespace tradewind
