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
  text << "rank " << rank;
  if (peer >= 0) {
    text << ": lost rank " << peer << " while waiting for " << doing;
    const std::string last = board ? board->read(peer) : "";
    if (!last.empty()) text << "; it said last: " << last;
  } else {
    text << ": lost a peer while " << doing;
  }
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
    peer = summer_missing_peer >= 0 ? summer_missing_peer : missing_peer;
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

void Exchange::Impl::look_after_wait(bool& has_warned) {
  std::chrono::milliseconds waited{0};
  {
    const std::scoped_lock lock(mutex);
    if (!is_waiting) {
      has_warned = false;
      return;
    }
    waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - waiting_since);
  }
  if (waited >= options.deadline) {
    fail(describe_late(waited) + ". The deadline of " + seconds_text(options.deadline) +
         " is over; all ranks end");
  } else if (waited >= options.patience && !has_warned) {
    has_warned = true;
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
    if (board) board->post("ended: " + reason);
    for (const TransferPtr& transfer : open) {
      if (transfer) transfer->cancel();
    }
  } catch (...) {  // out of memory: threads still see `failure`
  }
  wake_all();
}

// Connections close when the last transfer and Peers are gone: the other ranks notice at once.
void Exchange::Impl::tear_down() noexcept {
  std::unique_lock lock(mutex);
  for_watcher.wait_for(lock, kTearDown, [&] { return num_live_threads == 1 && !is_waiting; });
  std::vector<PieceState> gone;
  gone.swap(states);
  states.resize(gone.size());
  std::vector<std::vector<TransferPtr>> receiving{std::exchange(sending, {})};
  for (Channel& channel : channels) receiving.push_back(std::exchange(channel.receiving, {}));
  std::shared_ptr<Peers> connections = std::move(peers);
  lock.unlock();
  gone.clear();
  receiving.clear();
  connections.reset();
}

void Exchange::Impl::run_watcher() {
  bool has_warned = false;
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
    look_after_wait(has_warned);
  }
  tear_down();
}

}  // namespace tradewind
