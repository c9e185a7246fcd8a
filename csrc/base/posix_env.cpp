// The system's files. Locks: flock() belongs to the open file, which a forked child shares. A child
// (a loader's worker) that outlives its killed parent must not keep the parent's lock, so every
// fork() puts /dev/null in the place of the child's copies.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <mutex>

#include "base/env.h"

namespace tradewind {
namespace {

// Where direct I/O is taken and nothing says how: no file system asks for more than a page.
constexpr std::int64_t kUnreportedAlignment = 4096;

int result_of(int result) { return result < 0 ? -errno : 0; }

class LockedFiles {
 public:
  static LockedFiles& instance() {
    static auto* files = new LockedFiles;  // never destroyed: a fork may come at the very end
    return *files;
  }

  void add(int file) {
    const std::lock_guard lock(mutex_);
    if (std::find(files_.begin(), files_.end(), file) == files_.end()) files_.push_back(file);
  }

  void remove(int file) {
    const std::lock_guard lock(mutex_);
    files_.erase(std::remove(files_.begin(), files_.end(), file), files_.end());
  }

 private:
  LockedFiles() {
    (void)pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                         [] { instance().forget_in_child(); });
  }

  // Async-signal-safe, as all that runs between fork() and exec() of a threaded process must be.
  void forget_in_child() {
    const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int file : files_) {
      if (nothing >= 0 && dup2(nothing, file) == file) (void)fcntl(file, F_SETFD, FD_CLOEXEC);
    }
    if (nothing >= 0) (void)close(nothing);
    files_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<int> files_;
};

void fill(const struct stat& found, FileStatus& status) {
#ifdef __APPLE__
  const timespec& modified = found.st_mtimespec;
#else
  const timespec& modified = found.st_mtim;
#endif
  status.size_bytes = found.st_size;
  status.num_links = static_cast<std::int64_t>(found.st_nlink);
  status.is_directory = S_ISDIR(found.st_mode);
  status.is_file = S_ISREG(found.st_mode);
  status.modified_s =
      static_cast<double>(modified.tv_sec) + 1e-9 * static_cast<double>(modified.tv_nsec);
  status.device = static_cast<std::uint64_t>(found.st_dev);
  status.inode = static_cast<std::uint64_t>(found.st_ino);
}

// Set on the open file, not asked for at open(): a refusal there may leave a created file behind.
std::int64_t make_direct(int file) {
#if defined(O_DIRECT)
  const int flags = fcntl(file, F_GETFL);
  if (flags < 0 || fcntl(file, F_SETFL, flags | O_DIRECT) != 0) return 0;
#if defined(STATX_DIOALIGN)
  struct statx found{};
  if (statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
      (found.stx_mask & STATX_DIOALIGN) != 0 && found.stx_dio_offset_align != 0) {
    return std::max(found.stx_dio_mem_align, found.stx_dio_offset_align);
  }
#endif
  return kUnreportedAlignment;
#elif defined(F_NOCACHE)
  return fcntl(file, F_NOCACHE, 1) == 0 ? kUnreportedAlignment : 0;
#else
  (void)file;
  return 0;
#endif
}

class PosixFile final : public File {
 public:
  PosixFile(std::string path, int file, std::int64_t direct_alignment)
      : File(std::move(path)), file_(file), direct_alignment_(direct_alignment) {}

  ~PosixFile() noexcept override {
    if (owner_pid_ != 0) LockedFiles::instance().remove(file_);
    // Unlocked, not only closed: a child between vfork() and exec() still has the open file.
    if (owner_pid_ == getpid()) (void)flock(file_, LOCK_UN);
    (void)close(file_);
  }

  std::int64_t pwrite(const void* data, std::int64_t size_bytes,
                      std::int64_t offset) noexcept override {
    const ssize_t moved = ::pwrite(file_, data, static_cast<std::size_t>(size_bytes), offset);
    return moved < 0 ? -errno : moved;
  }

  std::int64_t pread(void* data, std::int64_t size_bytes, std::int64_t offset) noexcept override {
    const ssize_t moved = ::pread(file_, data, static_cast<std::size_t>(size_bytes), offset);
    return moved < 0 ? -errno : moved;
  }

  int sync_once() noexcept override {
#if defined(F_FULLFSYNC)
    // fsync() leaves the data in the drive's cache there.
    return result_of(fcntl(file_, F_FULLFSYNC) == 0 ? 0 : fsync(file_));
#else
    return result_of(fdatasync(file_));
#endif
  }

  int allocate_once(std::int64_t offset, std::int64_t size_bytes) noexcept override {
#ifdef __linux__
    return result_of(fallocate(file_, 0, offset, size_bytes));
#else
    (void)offset, (void)size_bytes;
    return -EOPNOTSUPP;
#endif
  }

  int truncate_once(std::int64_t size_bytes) noexcept override {
    return result_of(ftruncate(file_, size_bytes));
  }

  int status_once(FileStatus& status) const noexcept override {
    struct stat found{};
    const int result = result_of(fstat(file_, &found));
    if (result == 0) fill(found, status);
    return result;
  }

  int try_lock_once(LockKind kind) noexcept override {
    const int result =
        result_of(flock(file_, (kind == LockKind::kShared ? LOCK_SH : LOCK_EX) | LOCK_NB));
    if (result == 0) {
      LockedFiles::instance().add(file_);
      owner_pid_ = getpid();
    }
    return result;
  }

  [[nodiscard]] std::int64_t direct_alignment() const noexcept override {
    return direct_alignment_;
  }

 private:
  int file_;
  std::int64_t direct_alignment_;
  pid_t owner_pid_ = 0;  // of the lock
};

int open_flags(OpenMode mode) {
  // Not waiting: a FIFO in a file's place must not hold us up. Regular files do not care.
  constexpr int kAlways = O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
  switch (mode) {
    case OpenMode::kRead: return kAlways | O_RDONLY;
    case OpenMode::kWriteExisting: return kAlways | O_RDWR;
    case OpenMode::kCreateExclusive: return kAlways | O_RDWR | O_CREAT | O_EXCL;
    case OpenMode::kCreateOrTruncate: return kAlways | O_RDWR | O_CREAT | O_TRUNC;
  }
  return kAlways | O_RDONLY;
}

class PosixEnv final : public Env {
 public:
  int open_once(const std::string& path, OpenOptions options,
                std::unique_ptr<File>& file) override {
    const int opened = ::open(path.c_str(), open_flags(options.mode), 0666);
    if (opened < 0) return -errno;
    file = std::make_unique<PosixFile>(path, opened, options.direct ? make_direct(opened) : 0);
    return 0;
  }

  int make_directory_once(const std::string& path) override {
    return result_of(mkdir(path.c_str(), 0777));
  }

  int rename_once(const std::string& old_path, const std::string& new_path) override {
    return result_of(::rename(old_path.c_str(), new_path.c_str()));
  }

  int remove_once(const std::string& path) override { return result_of(unlink(path.c_str())); }

  int remove_directory_once(const std::string& path) override {
    return result_of(rmdir(path.c_str()));
  }

  int sync_directory_once(const std::string& path) override {
    const int directory = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return -errno;
    const int result = result_of(fsync(directory));
    (void)close(directory);
    return result == -EINVAL ? 0 : result;  // network file systems that have no such thing
  }

  int list_directory_once(const std::string& path, std::vector<std::string>& names) override {
    DIR* directory = opendir(path.c_str());
    if (directory == nullptr) return -errno;
    errno = 0;
    while (const dirent* entry = readdir(directory)) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
      errno = 0;
    }
    const int error = errno;
    (void)closedir(directory);
    return -error;
  }

  int status_once(const std::string& path, FileStatus& status) override {
    struct stat found{};
    const int result = result_of(stat(path.c_str(), &found));
    if (result == 0) fill(found, status);
    return result;
  }
};

}  // namespace

Env& posix_env() {
  static auto* env = new PosixEnv;  // never destroyed: threads may still write as the process ends
  return *env;
}

}  // namespace tradewind
