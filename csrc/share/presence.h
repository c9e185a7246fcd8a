// What this rank says on the board of what it does, and what the others said. Posted by a thread of
// its own, at once where the last post is a second old and then otherwise, so that nobody waits for
// a store. Any thread may call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "share/peers.h"

namespace tradewind {

class Presence {
 public:
  // `post_every`: between two posts, at least.
  Presence(std::shared_ptr<Board> board, int rank, int size,
           std::chrono::milliseconds post_every = std::chrono::seconds(1));
  ~Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  void tell(std::string activity);
  // The last word, which is posted before it returns: an end that others are told of, or a process
  // that has nothing left to do.
  void end(const std::string& reason) noexcept;
  void leave(const std::string& text) noexcept;
  // "rank 0 said last: forward, 0.2 s ago; rank 2 said nothing"
  [[nodiscard]] std::string others() const;
  // "rank 0 ended: its reason" of a rank that has called end(); empty where none has.
  [[nodiscard]] std::string why_ended() const;

 private:
  void post();
  void post_last(const std::string& text) noexcept;

  std::shared_ptr<Board> board_;
  int rank_, size_;
  std::chrono::milliseconds post_every_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string activity_;
  bool is_new_ = false;
  bool has_ended_ = false;
  bool is_closing_ = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace tradewind
