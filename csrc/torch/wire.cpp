#include "torch/wire.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <utility>

namespace tradewind {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

}  // namespace

Wire::Wire(c10::Device device, std::function<void(const std::exception&)> on_error)
    : device_(device), on_error_(std::move(on_error)) {
  if (device.is_cpu()) {
    thread_ = std::thread([this] { serve(); });
    return;
  }
  // Of high priority: what others wait for goes first where both could run.
  stream_.emplace(c10::impl::VirtualGuardImpl(device.type())
                      .getStreamFromGlobalPool(device, /*isHighPriority=*/true));
  behind_.emplace(device.type());
  done_.emplace(device.type());
}

Wire::~Wire() {
  {
    const std::scoped_lock lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

c10::Stream Wire::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void Wire::follow(const c10::Stream& stream) {
  if (!stream_) return;
  behind_->record(stream);
  behind_->block(*stream_);
}

void Wire::run_here(const Job& job, void* stream) {
  try {
    job(stream);
  } catch (const std::exception& error) {
    // First, so that whoever join() throws at finds everybody told.
    if (on_error_) on_error_(error);
    stop(std::current_exception());
  }
}

void Wire::run(Job job) {
  if (!stream_) {
    {
      const std::scoped_lock lock(mutex_);
      if (error_) return;
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    if (error_) return;
  }
  const c10::StreamGuard guard(*stream_);
  run_here(job, stream_->native_handle());
}

void Wire::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_closing_ || !jobs_.empty(); });
    if (is_closing_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    is_running_ = true;
    lock.unlock();
    const auto began = Clock::now();
    run_here(job, nullptr);
    lock.lock();
    times_.busy_s += seconds_since(began);
    is_running_ = false;
    changed_.notify_all();
  }
}

void Wire::join() {
  if (stream_) {
    done_->record(*stream_);
    done_->block(current_stream());
  }
  const auto began = Clock::now();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return error_ || (jobs_.empty() && !is_running_); });
  times_.waited_s += seconds_since(began);
  if (error_) std::rethrow_exception(error_);
}

void Wire::stop(std::exception_ptr error) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = std::move(error);
    jobs_.clear();
  }
  changed_.notify_all();
}

Wire::Times Wire::times() {
  const std::scoped_lock lock(mutex_);
  return times_;
}

}  // namespace tradewind
