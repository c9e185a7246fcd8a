// The system's files with a hook before each read and write: it may wait, or answer in their place.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"

namespace tradewind {

struct Access {
  bool is_write;
  std::int64_t offset, size_bytes;
  bool is_direct;
};
// Called from any thread. A number: how many bytes of it to do (reads: from the file, short ones
// are short), or the negative errno that the caller gets. None: all of it.
using AccessHook = std::function<std::optional<std::int64_t>(const Access&)>;

class HookedEnv final : public Env {
 public:
  explicit HookedEnv(AccessHook hook) : hook_(std::move(hook)) {}

  int open_once(const std::string& path, OpenOptions options,
                std::unique_ptr<File>& file) override {
    std::unique_ptr<File> opened;
    const int result = posix_env().open_once(path, options, opened);
    if (result == 0) file = std::make_unique<HookedFile>(path, std::move(opened), hook_);
    return result;
  }
  int make_directory_once(const std::string& path) override {
    return posix_env().make_directory_once(path);
  }
  int rename_once(const std::string& old_path, const std::string& new_path) override {
    return posix_env().rename_once(old_path, new_path);
  }
  int remove_once(const std::string& path) override { return posix_env().remove_once(path); }
  int remove_directory_once(const std::string& path) override {
    return posix_env().remove_directory_once(path);
  }
  int sync_directory_once(const std::string& path) override {
    return posix_env().sync_directory_once(path);
  }
  int list_directory_once(const std::string& path, std::vector<std::string>& names) override {
    return posix_env().list_directory_once(path, names);
  }
  int status_once(const std::string& path, FileStatus& status) override {
    return posix_env().status_once(path, status);
  }

 private:
  class HookedFile final : public File {
   public:
    HookedFile(const std::string& path, std::unique_ptr<File> file, AccessHook hook)
        : File(path), file_(std::move(file)), hook_(std::move(hook)) {}

    std::int64_t pwrite(const void* data, std::int64_t size_bytes,
                        std::int64_t offset) noexcept override {
      const auto answer = hook_({true, offset, size_bytes, direct_alignment() > 0});
      if (answer && *answer <= 0) return *answer;
      return file_->pwrite(data, answer.value_or(size_bytes), offset);
    }
    std::int64_t pread(void* data, std::int64_t size_bytes, std::int64_t offset) noexcept override {
      const auto answer = hook_({false, offset, size_bytes, direct_alignment() > 0});
      if (answer && *answer <= 0) return *answer;
      return file_->pread(data, answer.value_or(size_bytes), offset);
    }
    [[nodiscard]] std::int64_t direct_alignment() const noexcept override {
      return file_->direct_alignment();
    }
    int sync_once() noexcept override { return file_->sync_once(); }
    int allocate_once(std::int64_t offset, std::int64_t size_bytes) noexcept override {
      return file_->allocate_once(offset, size_bytes);
    }
    int truncate_once(std::int64_t size_bytes) noexcept override {
      return file_->truncate_once(size_bytes);
    }
    int status_once(FileStatus& status) const noexcept override {
      return file_->status_once(status);
    }
    int try_lock_once(LockKind kind) noexcept override { return file_->try_lock_once(kind); }

   private:
    std::unique_ptr<File> file_;
    AccessHook hook_;
  };

  AccessHook hook_;
};

}  // namespace tradewind
