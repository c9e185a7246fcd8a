// The file system behind an interface, so that tests can record, break and replay what a save does.
// Calls that end in _once are what an Env implements: one system call each, EINTR surfaces. All
// others retry EINTR (bounded), throw Error(kSystem) with the errno and the path, and are what
// callers use. Files and Envs are thread-safe, except that a File is destroyed by one thread after
// its last call. Paths are bytes; everything is close-on-exec.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tradewind {

struct FileStatus {
  std::int64_t size_bytes = 0;
  std::int64_t num_links = 0;
  bool is_directory = false;
  bool is_file = false;
  double modified_s = 0;     // since the epoch
  std::uint64_t device = 0;  // with inode: two names of one file have both alike, as long as the
  std::uint64_t inode = 0;   // file lives
};

enum class OpenMode : std::uint8_t {
  kRead,             // an existing file
  kWriteExisting,    // read and write, contents kept
  kCreateExclusive,  // read and write; EEXIST where the name is taken
  kCreateOrTruncate  // read and write, empty
};

struct OpenOptions {
  OpenMode mode = OpenMode::kRead;
  // Around the page cache, where the file system takes that: direct_alignment() says whether it
  // did. A refusal is no error, the file is then open, and buffered.
  bool direct = false;
};

enum class LockKind : std::uint8_t { kShared, kExclusive };

class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}
  // Closes, and gives up locks. Errors of closing are not reported: sync() first.
  virtual ~File() noexcept = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Raw: the bytes moved, which may be fewer than asked (pread: 0 at the end of the file), or the
  // negative errno. EINTR surfaces. write_fully() and read_fully() below loop.
  virtual std::int64_t pwrite(const void* data, std::int64_t size_bytes,
                              std::int64_t offset) noexcept = 0;
  virtual std::int64_t pread(void* data, std::int64_t size_bytes, std::int64_t offset) noexcept = 0;

  // Data, and the size that finds it, on stable storage. After an error other than EINTR the kernel
  // may have dropped the data: never retry, discard the file.
  void sync();
  // Takes the blocks of [offset, offset + size_bytes) and grows the file to hold them; what was
  // there stays. False where the file system cannot; ENOSPC is thrown, as any other error.
  bool allocate(std::int64_t offset, std::int64_t size_bytes);
  void truncate(std::int64_t size_bytes);
  [[nodiscard]] FileStatus status() const;
  // flock(), without waiting; false: another open file holds it. Held until this File is destroyed
  // or its process ends: forked children do not keep it.
  bool try_lock(LockKind kind);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // Zero: buffered. Else what address, size and offset of pwrite and pread must be multiples of.
  [[nodiscard]] virtual std::int64_t direct_alignment() const noexcept = 0;

  // Zero or the negative errno.
  virtual int sync_once() noexcept = 0;
  virtual int allocate_once(std::int64_t offset, std::int64_t size_bytes) noexcept = 0;
  virtual int truncate_once(std::int64_t size_bytes) noexcept = 0;
  virtual int status_once(FileStatus& status) const noexcept = 0;
  virtual int try_lock_once(LockKind kind) noexcept = 0;  // -EWOULDBLOCK: held by another

 private:
  std::string path_;
};

class Env {
 public:
  Env() = default;
  virtual ~Env() noexcept = default;
  Env(const Env&) = delete;
  Env& operator=(const Env&) = delete;

  [[nodiscard]] std::unique_ptr<File> open(const std::string& path, OpenOptions options);
  void make_directory(const std::string& path);    // one level; EEXIST where the name is taken
  void make_directories(const std::string& path);  // what is missing; syncs each one's parent
  void rename(const std::string& old_path, const std::string& new_path);  // replaces
  void remove(const std::string& path);                                   // a file's name
  void remove_directory(const std::string& path);                         // an empty one
  // Names in it made, moved and removed so far are on stable storage.
  void sync_directory(const std::string& path);
  [[nodiscard]] std::vector<std::string> list_directory(const std::string& path);  // sorted
  [[nodiscard]] std::optional<FileStatus> status(const std::string& path);  // none: not there

  // EFBIG where the file is larger.
  [[nodiscard]] std::string read_file(const std::string& path, std::int64_t max_bytes);
  struct WriteOptions {
    bool exclusive = false;  // EEXIST where the name is taken; else it is replaced in place
    bool sync = true;
  };
  // The directory is not synced, and what a failure leaves is not removed.
  void write_file(const std::string& path, std::string_view data, WriteOptions options);
  // Null: held by another. An exclusive one makes the file where it is missing. When this returns,
  // the name still stands for the locked file.
  [[nodiscard]] std::unique_ptr<File> lock_file(const std::string& path, LockKind kind);

  // Zero or the negative errno.
  virtual int open_once(const std::string& path, OpenOptions options,
                        std::unique_ptr<File>& file) = 0;
  virtual int make_directory_once(const std::string& path) = 0;
  virtual int rename_once(const std::string& old_path, const std::string& new_path) = 0;
  virtual int remove_once(const std::string& path) = 0;
  virtual int remove_directory_once(const std::string& path) = 0;
  virtual int sync_directory_once(const std::string& path) = 0;
  virtual int list_directory_once(const std::string& path, std::vector<std::string>& names) = 0;
  virtual int status_once(const std::string& path, FileStatus& status) = 0;
};

// The system's own. Lives as long as the process; a forked child may use it too.
Env& posix_env();

// All of it, or Error(kSystem). On a direct file, address, size and offset are multiples of its
// alignment; what a short write left unaligned is written again.
void write_fully(File& file, const void* data, std::int64_t size_bytes, std::int64_t offset);
// The bytes read: fewer than asked only where the file ends. A direct file may have written to the
// rest of its last block of `data` as well.
std::int64_t read_fully(File& file, void* data, std::int64_t size_bytes, std::int64_t offset);

}  // namespace tradewind
