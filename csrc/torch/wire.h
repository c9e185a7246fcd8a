// Where collective calls are made from: jobs run one after the other, in the order in which they
// come, beside whoever gives them. On the CPU that is a thread of its own, on a device a stream of
// its own, onto which jobs are queued at once by the calling thread. After a job that threw no
// other one runs. One thread at a time gives jobs and joins.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace tradewind {

class Wire {
 public:
  // On a device the stream is the current one of the thread that runs it; null on the CPU.
  using Job = std::function<void(void* stream)>;

  // `on_error`: told of what a job threw, on its thread, before join() throws it; it may stop()
  // with another error.
  Wire(c10::Device device, std::function<void(const std::exception&)> on_error);
  // Waits for the job that runs; others are dropped.
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // The next jobs come behind what is queued on this stream by now. Nothing on the CPU.
  void follow(const c10::Stream& stream);
  void run(Job job);
  // On the CPU: until every job has run. On a device: what is queued on the current stream from now
  // on comes behind them. Throws what a job threw.
  void join();
  // From any thread: no job begins any more, and join() throws what stopped it.
  void stop(std::exception_ptr error) noexcept;
  // Seconds in jobs, and of join(); on the CPU.
  struct Times {
    double busy_s = 0.0, waited_s = 0.0;
  };
  [[nodiscard]] Times times();
  // The device's current stream on this thread.
  [[nodiscard]] c10::Stream current_stream() const;

 private:
  void serve();
  void run_here(const Job& job, void* stream);

  c10::Device device_;
  std::function<void(const std::exception&)> on_error_;
  std::optional<c10::Stream> stream_;  // of a device
  std::optional<c10::Event> behind_, done_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool is_running_ = false;
  bool is_closing_ = false;
  std::exception_ptr error_;
  Times times_;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace tradewind
