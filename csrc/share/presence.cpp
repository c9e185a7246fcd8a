#include "share/presence.h"

#include <sstream>
#include <utility>

namespace tradewind {
namespace {

// Of ranks that are named in one error.
constexpr int kMostNamed = 16;
// Must match Meeting.wait_until_others_know() of python/tradewind/share/rendezvous.py.
constexpr const char* kEnded = "ended: ";

}  // namespace

Presence::Presence(std::shared_ptr<Board> board, int rank, int size,
                   std::chrono::milliseconds post_every)
    : board_(std::move(board)), rank_(rank), size_(size), post_every_(post_every) {
  if (size_ > 1) thread_ = std::thread([this] { post(); });
}

Presence::~Presence() {
  {
    const std::scoped_lock lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Presence::tell(std::string activity) {
  {
    const std::scoped_lock lock(mutex_);
    activity_ = std::move(activity);
    is_new_ = true;
  }
  changed_.notify_all();
}

void Presence::end(const std::string& reason) noexcept { post_last(kEnded + reason); }
void Presence::leave(const std::string& text) noexcept { post_last(text); }

void Presence::post_last(const std::string& text) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (has_ended_ || size_ == 1) return;
    has_ended_ = true;
  }
  board_->post(text);
}

void Presence::post() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_closing_ || (is_new_ && !has_ended_); });
    if (is_closing_) return;
    is_new_ = false;
    const std::string activity = activity_;
    lock.unlock();
    board_->post(activity);
    lock.lock();
    if (changed_.wait_for(lock, post_every_, [&] { return is_closing_; })) return;
  }
}

std::string Presence::others() const {
  std::ostringstream text;
  int num_named = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (num_named++ == kMostNamed) return text.str() + "; ...";
    const std::string last = board_->read(peer);
    text << (num_named > 1 ? "; " : "") << "rank " << peer
         << (last.empty() ? " said nothing" : " said last: " + last);
  }
  return text.str();
}

std::string Presence::why_ended() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::string last = board_->read(peer);
    if (last.starts_with(kEnded)) return "rank " + std::to_string(peer) + " " + last;
  }
  return "";
}

}  // namespace tradewind
