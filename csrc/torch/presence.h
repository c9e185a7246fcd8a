// What this rank says on the board of what it does, and what the others said: posted by a thread of
// its own, at most every second, so that nobody waits for a store. Any thread may call.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "share/peers.h"

namespace tradewind {

class Presence {
 public:
  Presence(std::shared_ptr<Board> board, int rank, int size);
  ~Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  void tell(std::string activity);
  // Posted at once, and the last word.
  void end(const std::string& reason) noexcept;
  // "rank 0 said last: forward, 0.2 s ago; rank 2 said nothing"
  [[nodiscard]] std::string others() const;
  // The reason of a rank that has ended; empty where none has.
  [[nodiscard]] std::string why_ended() const;

 private:
  void post();

  std::shared_ptr<Board> board_;
  int rank_, size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string activity_;
  bool is_new_ = false;
  bool has_ended_ = false;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace tradewind
