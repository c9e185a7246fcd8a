// Waiting that ends: for what can be asked, and for calls that take no deadline of their own. Any
// thread may call.
#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

namespace tradewind {

using Deadline = std::chrono::steady_clock::time_point;

// Asks until yes, true, or the deadline, false. Gives the core away at first, then sleeps, longer
// from time to time.
template <class IsDone>
bool poll_until(Deadline deadline, const IsDone& is_done) {
  constexpr int kNumYields = 64;
  constexpr std::chrono::microseconds kShortest{20};
  constexpr std::chrono::microseconds kLongest{1000};
  auto pause = kShortest;
  for (int num_asked = 1; !is_done(); ++num_asked) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    if (num_asked <= kNumYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 5 / 4, kLongest);
    }
  }
  return true;
}

// Runs call() on a thread of its own: whether it returned in time. One that did not is left behind
// with its thread, so it owns all that it touches; it must not throw.
template <class Call>
bool returns_within(Deadline deadline, Call call) {
  auto returned = std::make_shared<std::promise<void>>();
  std::future<void> future = returned->get_future();
  std::thread([returned, call = std::move(call)]() mutable {
    call();
    returned->set_value();
  }).detach();
  return future.wait_until(deadline) == std::future_status::ready;
}

}  // namespace tradewind
