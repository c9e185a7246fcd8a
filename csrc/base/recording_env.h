// An Env around another one that writes down every call that changes something, in the order in
// which they took effect, and lets chosen ones fail: from the record, tests make every state that a
// power cut could leave. Calls that change something go one at a time; thread-safe. Files keep the
// record alive, and are read and written through the page cache: a direct one is held to 4096-byte
// alignment here (EINVAL), so that tests behave alike on every file system.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"

namespace tradewind {

enum class OperationKind : std::uint8_t {
  kCreate,
  kOpen,  // for writing
  kWrite,
  kTruncate,  // also the opening of an existing file with kCreateOrTruncate
  kAllocate,
  kSync,
  kRename,
  kRemove,
  kMakeDirectory,
  kRemoveDirectory,
  kSyncDirectory,
  kLock,
};
const char* name_of(OperationKind kind);

struct Operation {
  OperationKind kind = OperationKind::kCreate;
  std::string path;        // as the caller wrote it; of a File, its name when it was opened
  std::string to;          // of a rename
  std::int64_t file = -1;  // the file or directory itself, by whatever name; never reused; -1: none
  std::int64_t offset = 0;      // of a write or allocation; the new size of a truncation
  std::int64_t size_bytes = 0;  // written or allocated
  std::string data;             // what was written, unless data is not kept
  int error = 0;                // the errno that the caller got
};

// What happens to one call instead. An error alone: nothing is done. `short_bytes` alone: a write
// stops there; other calls are not touched. Both: a write stops there and then reports the error.
struct Fault {
  int error = 0;
  std::int64_t short_bytes = 0;
  bool is_sticky = false;  // every later call too, until heal(); EINTR is never sticky
};

class RecordingEnv final : public Env {
 public:
  // `base` outlives this and its Files.
  explicit RecordingEnv(Env& base, bool keep_data = true);

  [[nodiscard]] std::vector<Operation> operations() const;
  // Forgets the operations; ids of files and faults stay.
  void clear();

  // The index-th recorded call from now on, from 0. Several may wait at once. Throws
  // Error(kBadValue) for a fault that is none.
  void inject(std::int64_t index, Fault fault);
  // No faults from now on.
  void heal();
  // Syncs of files or directories succeed, do nothing and are not recorded: what a program without
  // them would do.
  void drop_syncs(bool files, bool directories);
  // Files asked to be direct are buffered, as on a file system that refuses.
  void refuse_direct(bool refuse);

  int open_once(const std::string& path, OpenOptions options, std::unique_ptr<File>& file) override;
  int make_directory_once(const std::string& path) override;
  int rename_once(const std::string& old_path, const std::string& new_path) override;
  int remove_once(const std::string& path) override;
  int remove_directory_once(const std::string& path) override;
  int sync_directory_once(const std::string& path) override;
  int list_directory_once(const std::string& path, std::vector<std::string>& names) override;
  int status_once(const std::string& path, FileStatus& status) override;

  class Record;

 private:
  int open_to_write(const std::string& path, OpenMode mode, std::unique_ptr<File>& file,
                    std::int64_t& id);

  Env& base_;
  std::shared_ptr<Record> record_;
};

}  // namespace tradewind
