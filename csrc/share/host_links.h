// Connections between the ranks of one host, by sockets that have names but no place in a file
// system: files (of memory) are handed over them once, and then they are bells, and tell when a
// neighbour goes. They close when this is destroyed; a neighbour's death counts as going even where
// children of it hold its sockets. Calls before wait() on one thread, ring() and hang_up() on any.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "share/deadline.h"

namespace tradewind {

class HostLinks {
 public:
  struct Options {
    std::vector<int> ranks;          // of this host; the neighbours, by place
    std::vector<std::string> names;  // of their sockets, by place: used once, alike on all
    int own_place = 0;
    Deadline deadline;
  };

  // Meets all neighbours. Throws Error(kPeerLost) naming those who did not come by the deadline,
  // Error(kBadState) where the system refuses.
  explicit HostLinks(Options options);
  ~HostLinks() noexcept;
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  [[nodiscard]] int num_places() const { return static_cast<int>(links_.size()); }
  [[nodiscard]] int own_place() const { return options_.own_place; }
  [[nodiscard]] int rank_at(int place) const {
    return options_.ranks[static_cast<std::size_t>(place)];
  }

  // Gives `file` to every neighbour, and returns theirs by place (-1 for this rank's), which the
  // caller closes. Throws Error(kPeerLost).
  std::vector<int> trade_files(int file);

  // Wakes every neighbour's wait(), the next one where none is under way. Never waits.
  void ring() noexcept;
  // Sleeps until somebody rang or is gone. False once hung up, or where nobody is left.
  bool wait();
  [[nodiscard]] bool is_gone(int place) const noexcept {
    return links_[static_cast<std::size_t>(place)].is_gone.load();
  }
  // For the neighbours, this rank is gone from now on.
  void hang_up() noexcept;

 private:
  struct Link {
    int socket = -1;
    int process = -1;  // readable when the process has ended; -1 where the system cannot tell
    std::atomic<bool> is_gone{false};
  };

  void meet();
  void listen_for_others();
  [[nodiscard]] bool try_connect(int place);
  [[nodiscard]] bool try_accept();
  [[nodiscard]] int take_file(int place);
  void keep(int place, int socket);
  [[noreturn]] void fail_missing(const std::string& doing) const;
  void close_all() noexcept;

  Options options_;
  std::vector<Link> links_;  // by place
  int listener_ = -1;
  std::atomic<bool> is_hung_up_{false};
  pid_t owner_pid_ = 0;
};

}  // namespace tradewind
