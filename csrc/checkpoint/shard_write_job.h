// One save of ShardWriter: what its threads do together. Every thread of the pool calls work() once
// and returns when nothing is left for it; the one that ends the last block syncs.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <exception>
#include <mutex>

#include "checkpoint/shard_writer.h"

namespace tradewind {

// Aligned memory of one thread, for what cannot go out from where it lies. Taken when it is needed.
class BounceBuffer {
 public:
  static constexpr std::int64_t kBytes = std::int64_t{1} << 20;

  [[nodiscard]] std::byte* data();

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Free> memory_;
};

class ShardWrite::Job {
 public:
  explicit Job(ShardWriter::Request request);

  void work(BounceBuffer& bounce) noexcept;

  [[nodiscard]] std::int64_t num_blocks() const { return layout_.num_blocks(); }
  [[nodiscard]] bool is_over() const;
  [[nodiscard]] bool is_ours() const noexcept;
  bool wait_until(std::chrono::steady_clock::time_point deadline);
  [[nodiscard]] ShardResult result() const;
  void cancel() noexcept;

 private:
  enum class Stage : std::uint8_t { kNew, kOpening, kWriting, kSyncing, kOver };

  void open_file();
  void recycle_file(File& file) const;
  void write_block(std::int64_t block, BounceBuffer& bounce);
  void write_gathered(std::int64_t begin, std::int64_t end, BounceBuffer& bounce,
                      std::uint32_t& crc);
  void put(const std::byte* data, std::int64_t size_bytes, std::int64_t offset);
  void sync_file();
  void let_go(std::int64_t block) noexcept;

  [[nodiscard]] std::shared_ptr<File> file() const;
  [[nodiscard]] std::shared_ptr<File> buffered_in_place_of(const File& refused);
  void fail_with(std::exception_ptr error) noexcept;  // the first one is kept
  void end() noexcept;                                // with the lock held
  template <class Call>
  void take_part(std::unique_lock<std::mutex>& lock, const Call& call) noexcept;

  const ShardLayout layout_;
  const ShardWriter::Request request_;  // without header and regions, which `layout_` has
  const std::vector<std::int64_t> order_;
  const bool releases_by_block_;
  const pid_t owner_pid_;
  std::vector<std::uint32_t> block_crc32c_;  // each written by the thread that writes the block

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable for_workers_, for_waiters_;
  Stage stage_ = Stage::kNew;
  std::shared_ptr<File> opened_;  // holds the lock
  std::shared_ptr<File> file_;    // the same, or another one where direct I/O is refused
  std::size_t num_taken_ = 0, num_written_ = 0;
  int num_working_ = 0;
  std::exception_ptr error_;
};

}  // namespace tradewind
