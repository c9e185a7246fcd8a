#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {
namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kPostEvery{1000};
// Threads that have been told to end need no longer than this to notice.
constexpr std::chrono::seconds kTearDown{5};

std::string seconds_text(std::chrono::milliseconds duration) {
  std::ostringstream text;
  text.precision(3);
  text << static_cast<double>(duration.count()) / 1000.0 << " s";
  return text.str();
}

}  // namespace

std::string Exchange::Impl::lost(int peer, const std::string& doing, const std::string& error) {
  std::ostringstream text;
  text << "rank " << rank << ": lost rank " << peer << " while waiting for " << doing;
  const std::string last = board ? board->read(peer) : "";
  if (!last.empty()) text << "; it said last: " << last;
  text << " (" << error.substr(0, 200) << ")";
  return text.str();
}

std::string Exchange::Impl::describe_late(std::chrono::milliseconds waited) {
  std::string what;
  int peer = -1;
  {
    const std::scoped_lock lock(mutex);
    what = waiting_for;
    // Who holds up the sums holds up everything behind them.
    const int unready = unready_neighbour();
    peer = summer_missing_peer >= 0 ? summer_missing_peer : unready >= 0 ? unready : missing_peer;
  }
  std::ostringstream text;
  text << "rank " << rank << " has waited " << seconds_text(waited) << " for " << what;
  if (peer >= 0) text << "; rank " << peer << " did not arrive";
  for (int other = 0; board && other < size; ++other) {
    if (is_own(other)) continue;
    const std::string last = board->read(other);
    text << "; rank " << other << (last.empty() ? " said nothing" : " said last: " + last);
    if (other > 16) {
      text << "; ...";
      break;
    }
  }
  return text.str();
}

void Exchange::Impl::look_after_wait(std::optional<Clock::time_point>& warned_of) {
  std::chrono::milliseconds waited{0};
  Clock::time_point since;
  {
    const std::scoped_lock lock(mutex);
    if (!is_waiting) return;
    since = waiting_since;
    waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - waiting_since);
  }
  if (waited >= options.deadline) {
    fail(describe_late(waited) + ". The deadline of " + seconds_text(options.deadline) +
         " is over; all ranks end");
  } else if (waited >= options.patience && warned_of != since) {
    warned_of = since;
    if (callbacks.on_late) {
      callbacks.on_late(describe_late(waited) + ". It goes on waiting until " +
                        seconds_text(options.deadline));
    }
  }
}

void Exchange::Impl::fail(const std::string& reason) noexcept {
  try {
    std::vector<TransferPtr> open;
    {
      const std::scoped_lock lock(mutex);
      if (!failure.empty() || is_closing) return;
      failure = reason.empty() ? "the exchange was ended" : reason;
      open = sending;
      for (PieceState& piece : states) {
        open.insert(open.end(), piece.staging.begin(), piece.staging.end());
        open.insert(open.end(), piece.gathering.begin(), piece.gathering.end());
      }
      for (Channel& channel : channels) {
        open.insert(open.end(), channel.receiving.begin(), channel.receiving.end());
      }
    }
    for (const TransferPtr& transfer : open) {
      if (transfer) transfer->cancel();
    }
    if (options.neighbours) options.neighbours->hang_up();
  } catch (...) {  // out of memory: threads still see `failure`
  }
  wake_all();
}

// The other ranks notice at once that the connections close.
void Exchange::Impl::tear_down() noexcept {
  std::unique_lock lock(mutex);
  for_watcher.wait_for(lock, kTearDown, [&] { return num_live_threads == 1 && !is_waiting; });
  lock.unlock();
  let_go();
}

void Exchange::Impl::let_go() noexcept {
  std::shared_ptr<Peers> closing;
  const std::scoped_lock lock(mutex);
  const auto drop = [](std::vector<TransferPtr>& transfers) {
    for (TransferPtr& transfer : transfers) transfer = nullptr;
  };
  for (PieceState& piece : states) {
    drop(piece.staging);
    drop(piece.gathering);
  }
  for (Channel& channel : channels) drop(channel.receiving);
  sending.clear();
  gathering_transfer = nullptr;
  closing = std::move(peers);  // goes when the mutex is free again
}

void Exchange::Impl::end() noexcept {
  {
    const std::scoped_lock lock(mutex);
    is_closing = true;
    if (options.neighbours) options.neighbours->hang_up();
    for (const TransferPtr& transfer : sending) transfer->cancel();
    for (PieceState& piece : states) {
      for (const auto* open : {&piece.staging, &piece.gathering}) {
        for (const TransferPtr& transfer : *open) {
          if (transfer) transfer->cancel();
        }
      }
    }
    wake_all();
  }
  for (std::thread& thread : threads) thread.join();
  let_go();
}

void Exchange::Impl::run_watcher() {
  std::optional<Clock::time_point> warned_of;
  auto last_post = Clock::now() - kPostEvery;
  for (;;) {
    std::string text;
    {
      std::unique_lock lock(mutex);
      for_watcher.wait_for(lock, kTick, [&] { return is_closing || !failure.empty(); });
      if (!failure.empty()) break;
      if (is_closing) return;
      if (goodbye_until && Clock::now() > *goodbye_until) {
        for (const TransferPtr& transfer : channels.back().receiving) {
          if (transfer) transfer->cancel();
        }
      }
      text = "round " + std::to_string(statistics.num_rounds) + ", " +
             (is_waiting ? "waits for " + waiting_for : activity);
    }
    const auto now = Clock::now();
    if (board && now - last_post >= kPostEvery) {
      board->post(text);
      last_post = now;
    }
    look_after_wait(warned_of);
  }
  // What it says last: here, so that nothing older comes after it.
  if (board) board->post("ended: " + failure);
  tear_down();
}

}  // namespace tradewind
