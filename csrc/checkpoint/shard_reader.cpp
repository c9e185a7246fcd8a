#include "checkpoint/shard_reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"
#include "checkpoint/shard_layout.h"

namespace tradewind {
namespace {

// Shorter runs are copied: a call for each would cost more.
constexpr std::int64_t kLeastInPlaceBytes = 64 * 1024;

// A part of a block, and where its bytes lie once they are read.
struct Run {
  std::int64_t begin, end;  // in the file
  std::byte* data;
};

class ShardReader {
 public:
  ShardReader(Env& env, const ShardRequest& request) : env_(env), request_(request) {
    check_request();
    for (const ShardTarget& target : request.targets) {
      if (target.size_bytes > 0) targets_.push_back(target);
    }
    std::sort(targets_.begin(), targets_.end(),
              [](const auto& a, const auto& b) { return a.file_offset < b.file_offset; });
    for (const ShardTarget& target : targets_) {
      longest_target_ = std::max(longest_target_, target.size_bytes);
    }
    choose_blocks();
  }

  void run() {
    open_file();
    const auto num_threads =
        std::min<std::size_t>(static_cast<std::size_t>(request_.num_threads), blocks_.size());
    std::vector<std::thread> threads;
    try {
      for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // Those that there are do it.
    }
    work();
    for (std::thread& thread : threads) thread.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  [[nodiscard]] std::int64_t num_blocks() const {
    return static_cast<std::int64_t>(request_.block_crc32c.size());
  }
  [[nodiscard]] std::int64_t block_end(std::int64_t block) const {
    return std::min(request_.size_bytes, (block + 1) * request_.block_bytes);
  }

  void check_request() const {
    const std::int64_t bytes = request_.block_bytes;
    if (bytes <= 0 || bytes % kFilePageBytes != 0 || request_.size_bytes < 0 ||
        request_.num_threads < 1) {
      fail(ErrorKind::kBadValue, "shard '", request_.path, "': expected blocks of whole pages of ",
           kFilePageBytes, " bytes, a size and a number of threads, got ", bytes, ", ",
           request_.size_bytes, " and ", request_.num_threads);
    }
    const std::int64_t wanted = (request_.size_bytes + bytes - 1) / bytes;
    if (num_blocks() != wanted) {
      fail(ErrorKind::kBadValue, "shard '", request_.path, "': expected ", wanted,
           " checksums for ", request_.size_bytes, " bytes in blocks of ", bytes, ", got ",
           num_blocks());
    }
    for (const ShardTarget& target : request_.targets) {
      const bool is_inside = target.file_offset >= 0 && target.size_bytes >= 0 &&
                             target.size_bytes <= request_.size_bytes &&
                             target.file_offset <= request_.size_bytes - target.size_bytes;
      if (is_inside && (target.size_bytes == 0 || target.data != nullptr)) continue;
      fail(ErrorKind::kBadValue, "shard '", request_.path, "': expected targets within its ",
           request_.size_bytes, " bytes, got ", target.size_bytes, " bytes from ",
           target.file_offset, " for memory at ", target.data);
    }
  }

  void choose_blocks() {
    std::int64_t next = 0;  // the first block that is not chosen yet
    const auto choose_until = [&](std::int64_t end) {
      for (; next < end; ++next) blocks_.push_back(next);
    };
    for (const ShardTarget& target : targets_) {
      const std::int64_t end = target.file_offset + target.size_bytes;
      if (!request_.verifies_all) next = std::max(next, target.file_offset / request_.block_bytes);
      choose_until((end - 1) / request_.block_bytes + 1);
    }
    if (request_.verifies_all) choose_until(num_blocks());
  }

  void open_file() {
    file_ = env_.open(request_.path, {OpenMode::kRead, /*direct=*/true});
    locked_ = file_;
    if (!file_->try_lock(LockKind::kShared)) {
      fail_system(EWOULDBLOCK, request_.path,
                  "shard: expected a file that nobody overwrites; its checkpoint has been retired");
    }
    const FileStatus status = file_->status();
    if (status.size_bytes != request_.size_bytes) {
      fail(ErrorKind::kDamaged, "shard '", request_.path, "': expected ", request_.size_bytes,
           " bytes, found ", status.size_bytes);
    }
    if (file_->direct_alignment() > kFilePageBytes) (void)buffered_in_place_of(*file_);
  }

  void work() noexcept {
    try {
      const std::unique_ptr<std::byte, Free> bounce(static_cast<std::byte*>(std::aligned_alloc(
          kFilePageBytes, static_cast<std::size_t>(std::min(
                              request_.block_bytes, round_up_to_page(request_.size_bytes))))));
      if (!bounce) throw std::bad_alloc();
      for (;;) {
        const std::size_t idx = num_taken_.fetch_add(1);
        if (idx >= blocks_.size() || has_failed_) return;
        read_block(blocks_[idx], bounce.get());
      }
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      if (!error_) error_ = std::current_exception();
      has_failed_ = true;
    }
  }

  // Calls visit(target, first, end) for each target's part of a block.
  template <class Visit>
  void visit_targets(std::int64_t begin, std::int64_t end, const Visit& visit) const {
    // Targets are sorted by where they begin, and none is longer than the longest.
    auto target = std::lower_bound(
        targets_.begin(), targets_.end(), begin - longest_target_,
        [](const ShardTarget& one, std::int64_t offset) { return one.file_offset < offset; });
    for (; target != targets_.end() && target->file_offset < end; ++target) {
      const std::int64_t first = std::max(begin, target->file_offset);
      const std::int64_t last = std::min(end, target->file_offset + target->size_bytes);
      if (first < last) visit(*target, first, last);
    }
  }

  static std::byte* place_of(const ShardTarget& target, std::int64_t offset) {
    return static_cast<std::byte*>(target.data) + (offset - target.file_offset);
  }

  // The whole block as runs: pages that can be read where they are wanted, and the rest.
  [[nodiscard]] std::vector<Run> plan(std::int64_t begin, std::int64_t end,
                                      std::byte* bounce) const {
    const auto alignment =
        static_cast<std::uintptr_t>(std::max<std::int64_t>(file()->direct_alignment(), 1));
    std::vector<Run> runs;
    std::int64_t done = begin;
    const auto read_until = [&](std::int64_t offset) {
      if (done < offset) runs.push_back({done, offset, bounce + (done - begin)});
      done = offset;
    };
    visit_targets(begin, end, [&](const ShardTarget& target, std::int64_t from, std::int64_t to) {
      const std::int64_t first = round_up_to_page(std::max(from, done));
      const std::int64_t last = first + (to - first) / kFilePageBytes * kFilePageBytes;
      if (last - first < kLeastInPlaceBytes) return;
      std::byte* const there = place_of(target, first);
      if (reinterpret_cast<std::uintptr_t>(there) % alignment != 0) return;
      read_until(first);
      runs.push_back({first, last, there});
      done = last;
    });
    read_until(end);
    return runs;
  }

  void read_block(std::int64_t block, std::byte* bounce) {
    const std::int64_t begin = block * request_.block_bytes;
    const std::int64_t end = block_end(block);
    const std::vector<Run> runs = plan(begin, end, bounce);
    std::uint32_t crc = 0;
    for (const Run& run : runs) {
      read_run(run);
      crc = crc32c(crc, run.data, run.end - run.begin);
    }
    const std::uint32_t wanted = request_.block_crc32c[static_cast<std::size_t>(block)];
    if (crc != wanted) {
      fail(ErrorKind::kDamaged, "shard '", request_.path, "': block ", block, " (bytes ", begin,
           " to ", end, ") is not what was written: expected CRC-32C ", wanted, ", found ", crc);
    }
    visit_targets(begin, end, [&](const ShardTarget& target, std::int64_t from, std::int64_t to) {
      for (const Run& run : runs) {
        const std::int64_t first = std::max(from, run.begin);
        const std::int64_t last = std::min(to, run.end);
        if (first >= last) continue;
        const std::byte* source = run.data + (first - run.begin);
        std::byte* const place = place_of(target, first);
        if (source != place) std::memcpy(place, source, static_cast<std::size_t>(last - first));
      }
    });
  }

  void read_run(const Run& run) {
    const std::int64_t wanted = run.end - run.begin;
    const std::shared_ptr<File> from = file();
    // The end of a file of another maker may be no whole page; its buffer is.
    const std::int64_t asked = from->direct_alignment() > 0 ? round_up_to_page(wanted) : wanted;
    std::int64_t found = 0;
    try {
      found = read_fully(*from, run.data, asked, run.begin);
    } catch (const Error& error) {
      // Some file systems take the flag and refuse the call.
      if (error.error_number() != EINVAL || from->direct_alignment() == 0) throw;
      found = read_fully(*buffered_in_place_of(*from), run.data, wanted, run.begin);
    }
    if (found < wanted) {
      fail(ErrorKind::kDamaged, "shard '", request_.path, "': expected ", request_.size_bytes,
           " bytes, found its end in block ", run.begin / request_.block_bytes, " at ",
           run.begin + found);
    }
  }

  [[nodiscard]] std::shared_ptr<File> file() const {
    const std::scoped_lock lock(mutex_);
    return file_;
  }

  std::shared_ptr<File> buffered_in_place_of(const File& refused) {
    const std::scoped_lock lock(mutex_);
    if (file_.get() == &refused) {
      file_ = env_.open(request_.path, {OpenMode::kRead, /*direct=*/false});
    }
    return file_;
  }

  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };

  Env& env_;
  const ShardRequest& request_;
  std::vector<ShardTarget> targets_;
  std::int64_t longest_target_ = 0;
  std::vector<std::int64_t> blocks_;
  std::atomic<std::size_t> num_taken_{0};
  std::atomic<bool> has_failed_{false};

  mutable std::mutex mutex_;  // of what follows
  std::shared_ptr<File> file_, locked_;
  std::exception_ptr error_;
};

}  // namespace

void read_shard(Env& env, const ShardRequest& request) { ShardReader(env, request).run(); }

}  // namespace tradewind
