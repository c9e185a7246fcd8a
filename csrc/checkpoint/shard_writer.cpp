#include "checkpoint/shard_writer.h"

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "checkpoint/shard_write_job.h"

namespace tradewind {

// --- the handle ----------------------------------------------------------------------------------

ShardWrite::ShardWrite(std::shared_ptr<Job> job) : job_(std::move(job)) {}

ShardWrite::~ShardWrite() noexcept {
  // A child's copy of a lock that a thread of the parent may hold: it stays, untouched.
  if (!job_->is_ours()) (void)new std::shared_ptr<Job>(std::move(job_));
}

bool ShardWrite::wait_until(std::chrono::steady_clock::time_point deadline) const {
  if (!job_->is_ours()) {
    fail(ErrorKind::kBadState,
         "shard: expected to wait in the process that began the save, got a forked child");
  }
  return job_->wait_until(deadline);
}

ShardResult ShardWrite::result() const {
  if (!job_->is_ours()) {
    fail(ErrorKind::kBadState,
         "shard: expected to ask the process that began the save, got a forked child");
  }
  return job_->result();
}

void ShardWrite::cancel() noexcept {
  if (job_->is_ours()) job_->cancel();
}

// --- the pool ------------------------------------------------------------------------------------

struct ShardWriter::Pool {
  explicit Pool(int most) : max_threads(static_cast<std::size_t>(most)) {}

  void run() noexcept {
    BounceBuffer bounce;
    std::uint64_t last_job = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      for_threads.wait(lock, [&] { return is_closing || num_jobs != last_job; });
      if (is_closing) return;
      last_job = num_jobs;
      const std::shared_ptr<ShardWrite::Job> mine = job;
      lock.unlock();
      mine->work(bounce);
      lock.lock();
    }
  }

  // With the mutex held: as many threads as a save of so many blocks can use.
  void grow(std::int64_t num_blocks) {
    try {
      while (threads.size() < max_threads &&
             static_cast<std::int64_t>(threads.size()) < num_blocks) {
        threads.emplace_back([this] { run(); });
      }
    } catch (const std::system_error& error) {
      if (!threads.empty()) return;  // they do it alone
      fail(ErrorKind::kBadState, "shard writer: the system refused a thread: ", error.what());
    }
  }

  const std::size_t max_threads;
  const pid_t owner_pid = getpid();

  std::mutex mutex;  // of what follows
  std::condition_variable for_threads;
  std::shared_ptr<ShardWrite::Job> job;  // the last one
  std::uint64_t num_jobs = 0;
  bool is_closing = false;
  std::vector<std::thread> threads;
};

ShardWriter::ShardWriter(int num_threads) {
  constexpr int kMostThreads = 64;
  if (num_threads < 1 || num_threads > kMostThreads) {
    fail(ErrorKind::kBadValue, "shard writer: expected 1 to ", kMostThreads, " threads, got ",
         num_threads);
  }
  pool_ = std::make_unique<Pool>(num_threads);
}

ShardWriter::~ShardWriter() noexcept {
  close();
  if (pool_->owner_pid != getpid()) (void)pool_.release();  // its threads are not there
}

std::unique_ptr<ShardWrite> ShardWriter::start(Request request) {
  if (pool_->owner_pid != getpid()) {
    fail(ErrorKind::kBadState,
         "shard writer: expected the process that made it, got a forked child; make one there");
  }
  auto job = std::make_shared<ShardWrite::Job>(std::move(request));
  const std::scoped_lock lock(pool_->mutex);
  if (pool_->is_closing || (pool_->job && !pool_->job->is_over())) {
    fail(ErrorKind::kBadState, "shard writer: ",
         pool_->is_closing ? "it is closed; make another one"
                           : "expected one save at a time; wait for the last one first");
  }
  pool_->grow(job->num_blocks());
  pool_->job = job;
  ++pool_->num_jobs;
  pool_->for_threads.notify_all();
  return std::make_unique<ShardWrite>(std::move(job));
}

void ShardWriter::close() noexcept {
  if (pool_->owner_pid != getpid()) return;
  std::vector<std::thread> threads;
  {
    const std::scoped_lock lock(pool_->mutex);
    pool_->is_closing = true;
    if (pool_->job) pool_->job->cancel();
    threads.swap(pool_->threads);
    pool_->for_threads.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tradewind
