#include "checkpoint/shard_write_job.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <new>
#include <span>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"

namespace tradewind {
namespace {

// Shorter runs of memory are gathered: a call for each would cost more than the copy.
constexpr std::int64_t kLeastDirectBytes = 64 * 1024;

}  // namespace

std::byte* BounceBuffer::data() {
  if (!memory_) {
    memory_.reset(static_cast<std::byte*>(
        std::aligned_alloc(kFilePageBytes, static_cast<std::size_t>(kBytes))));
    if (!memory_) throw std::bad_alloc();
  }
  return memory_.get();
}

void BounceBuffer::Free::operator()(std::byte* memory) const noexcept { std::free(memory); }

ShardWrite::Job::Job(ShardWriter::Request request)
    : layout_(std::exchange(request.header, {}), std::exchange(request.regions, {}),
              request.block_bytes),
      request_(std::move(request)),
      order_(layout_.block_order(request_.closing.get())),
      releases_by_block_(layout_.is_each_byte_once()),
      owner_pid_(getpid()),
      block_crc32c_(static_cast<std::size_t>(layout_.num_blocks())) {}

// --- what threads do -----------------------------------------------------------------------------

// Runs one call of the job without the lock; whoever is last out of a job that has failed ends it.
template <class Call>
void ShardWrite::Job::take_part(std::unique_lock<std::mutex>& lock, const Call& call) noexcept {
  ++num_working_;
  lock.unlock();
  try {
    call();
  } catch (...) {
    fail_with(std::current_exception());
  }
  lock.lock();
  --num_working_;
  if (error_ && num_working_ == 0) end();
}

void ShardWrite::Job::end() noexcept {
  file_.reset();
  opened_.reset();
  stage_ = Stage::kOver;
  for_waiters_.notify_all();
}

void ShardWrite::Job::work(BounceBuffer& bounce) noexcept {
  std::unique_lock lock(mutex_);
  if (stage_ == Stage::kNew && !error_) {
    stage_ = Stage::kOpening;
    take_part(lock, [&] { open_file(); });
    if (!error_) stage_ = Stage::kWriting;
    for_workers_.notify_all();
  }
  for_workers_.wait(lock, [&] { return error_ || stage_ > Stage::kOpening; });
  while (!error_ && num_taken_ < order_.size()) {
    const std::int64_t block = order_[num_taken_++];
    take_part(lock, [&] { write_block(block, bounce); });
    if (!error_ && ++num_written_ == order_.size()) {
      stage_ = Stage::kSyncing;
      take_part(lock, [&] { sync_file(); });
      if (!error_) end();
    }
  }
}

void ShardWrite::Job::open_file() {
  Env& env = *request_.env;
  const OpenMode mode = request_.recycles ? OpenMode::kWriteExisting : OpenMode::kCreateExclusive;
  std::shared_ptr<File> opened = env.open(request_.path, {mode, /*direct=*/true});
  if (request_.recycles) {
    recycle_file(*opened);
  } else {
    (void)opened->allocate(0, layout_.size_bytes());
  }
  std::shared_ptr<File> used = opened;
  // Sectors that are larger than the pages of our format.
  if (opened->direct_alignment() > kFilePageBytes) {
    used = env.open(request_.path, {OpenMode::kWriteExisting, /*direct=*/false});
  }
  const std::scoped_lock lock(mutex_);
  opened_ = std::move(opened);
  file_ = std::move(used);
}

// Nobody else may see the file's old bytes go: no reader, and no other name.
void ShardWrite::Job::recycle_file(File& file) const {
  if (!file.try_lock(LockKind::kExclusive)) {
    fail_system(EWOULDBLOCK, request_.path, "shard: expected to recycle a file that nobody reads");
  }
  const FileStatus status = file.status();
  if (status.num_links > 1) {
    fail_system(EMLINK, request_.path, "shard: expected to recycle a file of one name, got ",
                status.num_links, " names");
  }
  if (status.size_bytes < layout_.size_bytes()) (void)file.allocate(0, layout_.size_bytes());
}

// Whole pages of long runs go out from where they lie, what is between them through the buffer.
void ShardWrite::Job::write_block(std::int64_t block, BounceBuffer& bounce) {
  const std::int64_t end = layout_.block_end(block);
  const std::int64_t alignment = std::max<std::int64_t>(file()->direct_alignment(), 1);
  std::int64_t done = layout_.block_begin(block);
  std::uint32_t crc = 0;
  layout_.visit(done, end, [&](std::int64_t offset, const std::byte* data, std::int64_t bytes) {
    const std::int64_t first = round_up_to_page(offset);
    const std::int64_t whole = (offset + bytes - first) / kFilePageBytes * kFilePageBytes;
    const std::byte* there = data + (first - offset);
    const bool is_aligned =
        reinterpret_cast<std::uintptr_t>(there) % static_cast<std::uintptr_t>(alignment) == 0;
    if (!is_aligned || whole < kLeastDirectBytes) return;
    write_gathered(done, first, bounce, crc);
    crc = crc32c(crc, there, whole);
    put(there, whole, first);
    done = first + whole;
  });
  write_gathered(done, end, bounce, crc);
  block_crc32c_[static_cast<std::size_t>(block)] = crc;
  let_go(block);
}

void ShardWrite::Job::write_gathered(std::int64_t begin, std::int64_t end, BounceBuffer& bounce,
                                     std::uint32_t& crc) {
  for (std::int64_t bytes = 0; begin < end; begin += bytes) {
    bytes = std::min(end - begin, BounceBuffer::kBytes);
    const std::span<std::byte> gathered(bounce.data(), static_cast<std::size_t>(bytes));
    layout_.copy(begin, gathered);
    crc = crc32c(crc, gathered.data(), bytes);
    put(gathered.data(), bytes, begin);
  }
}

void ShardWrite::Job::put(const std::byte* data, std::int64_t size_bytes, std::int64_t offset) {
  std::shared_ptr<File> to = file();
  try {
    write_fully(*to, data, size_bytes, offset);
  } catch (const Error& error) {
    // Some file systems take the flag and refuse the call.
    if (error.error_number() != EINVAL || to->direct_alignment() == 0) throw;
    write_fully(*buffered_in_place_of(*to), data, size_bytes, offset);
  }
}

void ShardWrite::Job::let_go(std::int64_t block) noexcept {
  if (!request_.closing || !releases_by_block_) return;
  layout_.visit(layout_.block_begin(block), layout_.block_end(block),
                [&](std::int64_t, const std::byte* data, std::int64_t bytes) {
                  request_.closing->release(data, bytes);
                });
}

void ShardWrite::Job::sync_file() {
  if (request_.closing) request_.closing->open();
  const std::shared_ptr<File> written = file();
  if (written->status().size_bytes != layout_.size_bytes()) written->truncate(layout_.size_bytes());
  written->sync();
}

std::shared_ptr<File> ShardWrite::Job::file() const {
  const std::scoped_lock lock(mutex_);
  return file_;
}

std::shared_ptr<File> ShardWrite::Job::buffered_in_place_of(const File& refused) {
  const std::scoped_lock lock(mutex_);
  if (file_.get() == &refused) {
    file_ = request_.env->open(request_.path, {OpenMode::kWriteExisting, /*direct=*/false});
  }
  return file_;
}

void ShardWrite::Job::fail_with(std::exception_ptr error) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (!error_ && stage_ != Stage::kOver) error_ = std::move(error);
    for_workers_.notify_all();
  }
  if (request_.closing) request_.closing->open();
}

// --- what callers do -----------------------------------------------------------------------------

bool ShardWrite::Job::is_over() const {
  const std::scoped_lock lock(mutex_);
  return stage_ == Stage::kOver;
}

bool ShardWrite::Job::is_ours() const noexcept { return owner_pid_ == getpid(); }

bool ShardWrite::Job::wait_until(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return for_waiters_.wait_until(lock, deadline, [&] { return stage_ == Stage::kOver; });
}

ShardResult ShardWrite::Job::result() const {
  const std::scoped_lock lock(mutex_);
  if (stage_ != Stage::kOver) {
    fail(ErrorKind::kBadState, "shard '", request_.path,
         "': expected a save that is over; wait for it first");
  }
  if (error_) std::rethrow_exception(error_);
  ShardResult result{layout_.size_bytes(), 0, block_crc32c_};
  for (std::int64_t block = 0; block < layout_.num_blocks(); ++block) {
    result.crc32c = crc32c_combine(result.crc32c, block_crc32c_[static_cast<std::size_t>(block)],
                                   layout_.block_end(block) - layout_.block_begin(block));
  }
  return result;
}

void ShardWrite::Job::cancel() noexcept {
  if (is_over()) return;
  try {
    fail_system(ECANCELED, request_.path, "shard: its save was cancelled");
  } catch (...) {
    fail_with(std::current_exception());
  }
  const std::scoped_lock lock(mutex_);
  if (num_working_ == 0) end();  // else the last one out does
}

}  // namespace tradewind
