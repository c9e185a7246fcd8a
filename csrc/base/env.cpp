#include "base/env.h"

#include <algorithm>
#include <cerrno>

#include "base/error.h"

namespace tradewind {
namespace {

// A signal every millisecond (a profiler's) may interrupt a long call again and again; a call that
// never gets through has to end all the same.
constexpr int kMaxFruitlessCalls = 1000;

template <class Call>
int retried(const Call& call) {
  int result = call();
  for (int i = 1; result == -EINTR && i < kMaxFruitlessCalls; ++i) result = call();
  return result;
}

void check(int result, const std::string& path, const char* tried) {
  if (result < 0) fail_system(-result, path, tried);
}

std::string parent_of(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  const std::size_t end = path.find_last_not_of('/', slash);
  return end == std::string::npos ? "/" : path.substr(0, end + 1);
}

std::string without_trailing_slashes(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  return end == std::string::npos ? path.substr(0, 1) : path.substr(0, end + 1);
}

const char* opening(OpenMode mode) {
  switch (mode) {
    case OpenMode::kRead: return "could not be opened";
    case OpenMode::kWriteExisting: return "could not be opened for writing";
    case OpenMode::kCreateExclusive:
    case OpenMode::kCreateOrTruncate: return "could not be created";
  }
  return "could not be opened";
}

}  // namespace

void File::sync() {
  check(retried([&] { return sync_once(); }), path(), "could not be synced");
}

bool File::allocate(std::int64_t offset, std::int64_t size_bytes) {
  const int result = retried([&] { return allocate_once(offset, size_bytes); });
  if (result == -EOPNOTSUPP || result == -EINVAL || result == -ENOSYS) return false;
  if (result < 0) {
    fail_system(-result, path(), "could not be given ", size_bytes, " bytes at offset ", offset);
  }
  return true;
}

void File::truncate(std::int64_t size_bytes) {
  const int result = retried([&] { return truncate_once(size_bytes); });
  if (result < 0) fail_system(-result, path(), "could not be cut to ", size_bytes, " bytes");
}

FileStatus File::status() const {
  FileStatus status;
  check(retried([&] { return status_once(status); }), path(), "its status could not be read");
  return status;
}

bool File::try_lock(LockKind kind) {
  const int result = retried([&] { return try_lock_once(kind); });
  if (result == -EWOULDBLOCK) return false;
  check(result, path(), "could not be locked");
  return true;
}

std::unique_ptr<File> Env::open(const std::string& path, OpenOptions options) {
  std::unique_ptr<File> file;
  check(retried([&] { return open_once(path, options, file); }), path, opening(options.mode));
  return file;
}

void Env::make_directory(const std::string& path) {
  check(retried([&] { return make_directory_once(path); }), path,
        "the directory could not be made");
}

void Env::make_directories(const std::string& path) {
  const std::string level = without_trailing_slashes(path);
  const std::optional<FileStatus> found = status(level);
  if (found && found->is_directory) return;
  const std::string parent = parent_of(level);
  if (!found && parent != level) make_directories(parent);
  const int result = retried([&] { return make_directory_once(level); });
  if (result == -EEXIST) {
    const std::optional<FileStatus> winner = status(level);
    if (!winner || !winner->is_directory) fail_system(ENOTDIR, level, "a directory was expected");
  } else {
    check(result, level, "the directory could not be made");
  }
  sync_directory(parent);
}

void Env::rename(const std::string& old_path, const std::string& new_path) {
  const int result = retried([&] { return rename_once(old_path, new_path); });
  if (result < 0) fail_system(-result, old_path, "could not be renamed to '", new_path, "'");
}

void Env::remove(const std::string& path) {
  check(retried([&] { return remove_once(path); }), path, "could not be removed");
}

void Env::remove_directory(const std::string& path) {
  check(retried([&] { return remove_directory_once(path); }), path,
        "the directory could not be removed");
}

void Env::sync_directory(const std::string& path) {
  check(retried([&] { return sync_directory_once(path); }), path,
        "the directory could not be synced");
}

std::vector<std::string> Env::list_directory(const std::string& path) {
  std::vector<std::string> names;
  const int result = retried([&] {
    names.clear();
    return list_directory_once(path, names);
  });
  check(result, path, "the directory could not be read");
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<FileStatus> Env::status(const std::string& path) {
  FileStatus status;
  const int result = retried([&] { return status_once(path, status); });
  if (result == -ENOENT || result == -ENOTDIR) return std::nullopt;
  check(result, path, "its status could not be read");
  return status;
}

std::string Env::read_file(const std::string& path, std::int64_t max_bytes) {
  if (max_bytes < 0) {
    fail(ErrorKind::kBadValue, "reading '", path, "': expected a limit of 0 bytes or more, got ",
         max_bytes);
  }
  const std::unique_ptr<File> file = open(path, {});
  // What grows meanwhile, or has no size (procfs), is read to its end too.
  std::int64_t capacity = std::min(file->status().size_bytes, max_bytes) + 1;
  std::string data;
  std::int64_t size = 0;
  while (true) {
    data.resize(static_cast<std::size_t>(capacity));
    size += read_fully(*file, data.data() + size, capacity - size, size);
    if (size > max_bytes) fail_system(EFBIG, path, "expected at most ", max_bytes, " bytes");
    if (size < capacity) break;
    capacity = std::min(2 * capacity, max_bytes + 1);
  }
  data.resize(static_cast<std::size_t>(size));
  return data;
}

void Env::write_file(const std::string& path, std::string_view data, WriteOptions options) {
  const std::unique_ptr<File> file = open(
      path, {.mode = options.exclusive ? OpenMode::kCreateExclusive : OpenMode::kCreateOrTruncate});
  write_fully(*file, data.data(), static_cast<std::int64_t>(data.size()), 0);
  if (options.sync) file->sync();
}

std::unique_ptr<File> Env::lock_file(const std::string& path, LockKind kind) {
  const OpenMode mode = kind == LockKind::kShared ? OpenMode::kRead : OpenMode::kWriteExisting;
  // Whoever moves or removes the file between our open and our lock makes us look again.
  for (int i = 0; i < kMaxFruitlessCalls; ++i) {
    std::unique_ptr<File> file;
    int result = retried([&] { return open_once(path, {.mode = mode}, file); });
    if (result == -ENOENT && kind == LockKind::kExclusive) {
      result = retried([&] { return open_once(path, {.mode = OpenMode::kCreateExclusive}, file); });
      if (result == -EEXIST) continue;
    }
    check(result, path, "could not be opened for a lock");
    if (!file->try_lock(kind)) return nullptr;
    const FileStatus locked = file->status();
    const std::optional<FileStatus> named = status(path);
    if (named && named->device == locked.device && named->inode == locked.inode) return file;
  }
  fail_system(EBUSY, path, "could not be locked, as it is replaced all the time");
}

// Bytes of a step that count: direct I/O goes on from a multiple of the alignment.
static std::int64_t whole(std::int64_t size_bytes, std::int64_t alignment) {
  return alignment > 0 ? size_bytes / alignment * alignment : size_bytes;
}

void write_fully(File& file, const void* data, std::int64_t size_bytes, std::int64_t offset) {
  const auto* bytes = static_cast<const char*>(data);
  std::int64_t done = 0;
  for (int fruitless = 0; done < size_bytes;) {
    const std::int64_t moved = file.pwrite(bytes + done, size_bytes - done, offset + done);
    if (moved < 0 && moved != -EINTR) {
      fail_system(static_cast<int>(-moved), file.path(), "could not be written (",
                  size_bytes - done, " bytes at offset ", offset + done, ")");
    }
    const std::int64_t counted =
        moved == size_bytes - done
            ? moved
            : whole(std::max<std::int64_t>(moved, 0), file.direct_alignment());
    done += counted;
    fruitless = counted > 0 ? 0 : fruitless + 1;
    if (fruitless == kMaxFruitlessCalls) {
      fail_system(moved < 0 ? EINTR : EIO, file.path(), "could not be written, without progress (",
                  size_bytes - done, " bytes at offset ", offset + done, ")");
    }
  }
}

std::int64_t read_fully(File& file, void* data, std::int64_t size_bytes, std::int64_t offset) {
  auto* bytes = static_cast<char*>(data);
  std::int64_t done = 0;
  for (int interrupted = 0; done < size_bytes;) {
    const std::int64_t moved = file.pread(bytes + done, size_bytes - done, offset + done);
    if (moved == -EINTR && ++interrupted < kMaxFruitlessCalls) continue;
    if (moved < 0) {
      fail_system(static_cast<int>(-moved), file.path(), "could not be read (", size_bytes - done,
                  " bytes at offset ", offset + done, ")");
    }
    interrupted = 0;
    done += moved;
    // Direct reads come in whole units, except where the file ends.
    if (moved == 0 || whole(moved, file.direct_alignment()) != moved) break;
  }
  return done;
}

}  // namespace tradewind
