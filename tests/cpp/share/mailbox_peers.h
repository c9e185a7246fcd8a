// Peers between threads of one process, in memory. It does its worst within the contract of
// share/peers.h: messages of different tags overtake each other, what is given up is written to
// until its Peers are gone, data under way is lost with a connection, interrupts may come late.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/split_mix.h"
#include "share/peers.h"

namespace tradewind {

struct MailboxOptions {
  std::uint64_t seed = 1;
  // Of each half of a message's way, at random. 0: at once.
  std::chrono::microseconds longest_delay{0};
  double bytes_per_s = 0.0;  // of what a rank sends; 0: no limit
  // A message leaves only once its receive is posted, as Gloo's do.
  bool is_rendezvous = true;
};

class MailboxNetwork : public std::enable_shared_from_this<MailboxNetwork> {
 public:
  MailboxNetwork(int num_ranks, const MailboxOptions& options)
      : options_(options),
        random_(options.seed),
        has_left_(static_cast<std::size_t>(num_ranks)),
        free_at_(static_cast<std::size_t>(num_ranks)) {
    if (has_delays()) thread_ = std::thread([this] { run(); });
  }
  ~MailboxNetwork() {
    {
      const std::scoped_lock lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  MailboxNetwork(const MailboxNetwork&) = delete;
  MailboxNetwork& operator=(const MailboxNetwork&) = delete;

  [[nodiscard]] int num_ranks() const { return static_cast<int>(has_left_.size()); }

  std::shared_ptr<Peers> connect(int rank);

  // As when its process dies.
  void break_rank(int rank) {
    const std::scoped_lock lock(mutex_);
    close(rank);
  }
  // It breaks with the nth message, from 1, of a kind (its tag modulo 4) that it sends.
  void break_at(int rank, std::uint32_t kind, int nth) {
    const std::scoped_lock lock(mutex_);
    break_at_[{rank, kind}] = nth;
  }

 private:
  friend class MailboxPeers;
  friend class MailboxTransfer;
  friend struct MailboxEndpoint;
  using Clock = std::chrono::steady_clock;
  using Bytes = std::vector<std::byte>;
  using LaneKey = std::tuple<int, int, std::uint32_t>;  // from, to, tag

  // A send or a receive.
  struct Half {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    std::size_t size_bytes = 0;
    bool is_over = false;         // its memory is no longer touched
    bool is_said = false;         // and wait() has said so
    bool is_given_up = false;     // nobody can wait for it any more
    bool is_interrupted = false;  // not said yet
    bool is_cancelled = false;
    bool is_waited_for = false;
    std::string error;
    std::condition_variable changed;
  };
  using HalfPtr = std::shared_ptr<Half>;

  // Messages of one tag from one rank to another, in order.
  struct Lane {
    std::deque<HalfPtr> sends, receives;
    std::deque<Bytes> under_way;
    std::int64_t num_leaving = 0, num_arriving = 0;  // whose time has come
  };
  struct Event {
    Clock::time_point due;
    bool is_arrival;
    LaneKey lane;
    bool operator>(const Event& other) const { return due > other.due; }
  };

  [[nodiscard]] bool has_delays() const {
    return options_.longest_delay.count() > 0 || options_.bytes_per_s > 0.0;
  }

  // Those below with the mutex held.
  void check_open(int rank, int peer) const {
    for (const int either : {rank, peer}) {
      if (gone_.contains(either)) {
        fail(ErrorKind::kPeerLost, "connection closed by rank ", either);
      }
    }
  }

  void close(int rank) {
    if (!gone_.insert(rank).second) return;
    for (auto& [key, lane] : lanes_) {
      if (std::get<0>(key) != rank && std::get<1>(key) != rank) continue;
      for (auto* halves : {&lane.sends, &lane.receives}) {
        for (const HalfPtr& half : *halves) {
          half->error = "connection closed by rank " + std::to_string(rank);
          half->changed.notify_all();
        }
        halves->clear();
      }
      lane.under_way.clear();
    }
  }

  HalfPtr post(int rank, int peer, std::uint32_t tag, Half&& what, bool is_send) {
    const std::scoped_lock lock(mutex_);
    check_open(rank, peer);
    const auto half = std::make_shared<Half>();
    std::tie(half->from, half->to, half->size_bytes) =
        std::tie(what.from, what.to, what.size_bytes);
    const LaneKey key = is_send ? LaneKey{rank, peer, tag} : LaneKey{peer, rank, tag};
    if (!is_send) {
      lanes_[key].receives.push_back(half);
      advance(key);
      return half;
    }
    const auto fault = break_at_.find({rank, tag % 4});
    if (fault != break_at_.end() && --fault->second == 0) {
      close(rank);
      check_open(rank, peer);
    }
    lanes_[key].sends.push_back(half);
    Clock::time_point due = Clock::now() + random_delay();
    if (options_.bytes_per_s > 0.0) {
      Clock::time_point& free_at = free_at_[static_cast<std::size_t>(rank)];
      free_at = std::max(free_at, due) +
                std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                    static_cast<double>(half->size_bytes) / options_.bytes_per_s));
      due = free_at;
    }
    schedule({due, false, key});
    advance(key);
    return half;
  }

  std::chrono::microseconds random_delay() {
    return std::chrono::microseconds(random_.below(options_.longest_delay.count() + 1));
  }

  void schedule(const Event& event) {
    if (has_delays()) {
      events_.push(event);
      changed_.notify_all();
      return;
    }
    Lane& lane = lanes_[event.lane];
    ++(event.is_arrival ? lane.num_arriving : lane.num_leaving);
  }

  void advance(const LaneKey& key) {
    Lane& lane = lanes_[key];
    while (lane.num_leaving > 0 && !lane.sends.empty() &&
           (!options_.is_rendezvous || lane.receives.size() > lane.under_way.size())) {
      Half& half = *lane.sends.front();
      lane.under_way.emplace_back(half.from, half.from + half.size_bytes);
      half.is_over = true;
      half.changed.notify_all();
      lane.sends.pop_front();
      --lane.num_leaving;
      schedule({Clock::now() + random_delay(), true, key});
    }
    while (lane.num_arriving > 0 && !lane.under_way.empty() && !lane.receives.empty()) {
      Half& half = *lane.receives.front();
      const Bytes& bytes = lane.under_way.front();
      EXPECT_EQ(bytes.size(), half.size_bytes) << "tag " << std::get<2>(key);
      std::memcpy(half.to, bytes.data(), std::min(bytes.size(), half.size_bytes));
      half.is_over = true;
      half.changed.notify_all();
      lane.receives.pop_front();
      lane.under_way.pop_front();
      --lane.num_arriving;
    }
  }

  void forget_given_up(int rank) {
    const auto is_given_up = [](const HalfPtr& half) { return half->is_given_up; };
    for (auto& [key, lane] : lanes_) {
      if (std::get<0>(key) == rank) std::erase_if(lane.sends, is_given_up);
      if (std::get<1>(key) == rank) std::erase_if(lane.receives, is_given_up);
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!is_ending_) {
      if (events_.empty()) {
        changed_.wait(lock);
      } else if (const Event event = events_.top(); event.due > Clock::now()) {
        changed_.wait_until(lock, event.due);
      } else {
        events_.pop();
        Lane& lane = lanes_[event.lane];
        ++(event.is_arrival ? lane.num_arriving : lane.num_leaving);
        advance(event.lane);
      }
    }
  }

  const MailboxOptions options_;
  std::mutex mutex_;
  SplitMix random_;
  std::vector<bool> has_left_;  // whose Peers are gone
  std::vector<Clock::time_point> free_at_;
  std::set<int> gone_;
  std::map<std::pair<int, std::uint32_t>, int> break_at_;
  std::map<LaneKey, Lane> lanes_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::condition_variable changed_;
  bool is_ending_ = false;
  std::thread thread_;
};

// Closes the rank's connections when its Peers and all its transfers are gone.
struct MailboxEndpoint {
  MailboxEndpoint(std::shared_ptr<MailboxNetwork> the_network, int the_rank)
      : network(std::move(the_network)), rank(the_rank) {}
  ~MailboxEndpoint() { network->break_rank(rank); }
  MailboxEndpoint(const MailboxEndpoint&) = delete;
  MailboxEndpoint& operator=(const MailboxEndpoint&) = delete;

  const std::shared_ptr<MailboxNetwork> network;
  const int rank;
};

class MailboxTransfer final : public Transfer {
 public:
  MailboxTransfer(std::shared_ptr<MailboxEndpoint> endpoint, MailboxNetwork::HalfPtr half)
      : endpoint_(std::move(endpoint)), half_(std::move(half)) {}
  ~MailboxTransfer() override {
    const std::scoped_lock lock(network().mutex_);
    EXPECT_FALSE(half_->is_waited_for) << "destroyed while it is waited for";
    half_->is_given_up = true;
    const auto rank = static_cast<std::size_t>(endpoint_->rank);
    if (network().has_left_[rank]) network().forget_given_up(endpoint_->rank);
  }
  MailboxTransfer(const MailboxTransfer&) = delete;
  MailboxTransfer& operator=(const MailboxTransfer&) = delete;

  bool wait() override {
    MailboxNetwork::Half& half = *half_;
    std::unique_lock lock(network().mutex_);
    EXPECT_FALSE(half.is_said) << "waited for again after it was over";
    EXPECT_FALSE(half.is_waited_for) << "waited for by two threads";
    half.is_waited_for = true;
    half.changed.wait(lock, [&] {
      return half.is_over || half.is_interrupted || half.is_cancelled || !half.error.empty();
    });
    half.is_waited_for = false;
    if (half.is_cancelled) fail(ErrorKind::kPeerLost, "the transfer was cancelled");
    if (!half.error.empty()) fail(ErrorKind::kPeerLost, half.error);
    if (std::exchange(half.is_interrupted, false)) return false;
    half.is_said = true;
    return true;
  }
  void interrupt() noexcept override { set(&MailboxNetwork::Half::is_interrupted); }
  void cancel() noexcept override { set(&MailboxNetwork::Half::is_cancelled); }

 private:
  [[nodiscard]] MailboxNetwork& network() const { return *endpoint_->network; }
  void set(bool MailboxNetwork::Half::* what) noexcept {
    const std::scoped_lock lock(network().mutex_);
    (*half_).*what = true;
    half_->changed.notify_all();
  }

  const std::shared_ptr<MailboxEndpoint> endpoint_;
  const MailboxNetwork::HalfPtr half_;
};

class MailboxPeers final : public Peers {
 public:
  explicit MailboxPeers(std::shared_ptr<MailboxEndpoint> endpoint)
      : endpoint_(std::move(endpoint)) {}
  ~MailboxPeers() override {
    MailboxNetwork& network = *endpoint_->network;
    const std::scoped_lock lock(network.mutex_);
    network.has_left_[static_cast<std::size_t>(endpoint_->rank)] = true;
    network.forget_given_up(endpoint_->rank);
  }
  MailboxPeers(const MailboxPeers&) = delete;
  MailboxPeers& operator=(const MailboxPeers&) = delete;

  [[nodiscard]] int rank() const override { return endpoint_->rank; }
  [[nodiscard]] int size() const override { return endpoint_->network->num_ranks(); }
  std::unique_ptr<Transfer> send(const void* data, std::int64_t size_bytes, int peer,
                                 std::uint32_t tag) override {
    MailboxNetwork::Half half;
    half.from = static_cast<const std::byte*>(data);
    half.size_bytes = static_cast<std::size_t>(size_bytes);
    return transfer(endpoint_->network->post(rank(), peer, tag, std::move(half), true));
  }
  std::unique_ptr<Transfer> receive(void* data, std::int64_t size_bytes, int peer,
                                    std::uint32_t tag) override {
    MailboxNetwork::Half half;
    half.to = static_cast<std::byte*>(data);
    half.size_bytes = static_cast<std::size_t>(size_bytes);
    return transfer(endpoint_->network->post(rank(), peer, tag, std::move(half), false));
  }

 private:
  [[nodiscard]] std::unique_ptr<Transfer> transfer(MailboxNetwork::HalfPtr half) const {
    return std::make_unique<MailboxTransfer>(endpoint_, std::move(half));
  }

  const std::shared_ptr<MailboxEndpoint> endpoint_;
};

inline std::shared_ptr<Peers> MailboxNetwork::connect(int rank) {
  return std::make_shared<MailboxPeers>(
      std::make_shared<MailboxEndpoint>(shared_from_this(), rank));
}

// What each rank posted last.
struct MemoryBoard {
  explicit MemoryBoard(int num_ranks) : lines(static_cast<std::size_t>(num_ranks)) {}

  class Side final : public Board {
   public:
    Side(std::shared_ptr<MemoryBoard> board, int rank) : board_(std::move(board)), rank_(rank) {}
    void post(const std::string& text) noexcept override {
      const std::scoped_lock lock(board_->mutex);
      board_->lines[static_cast<std::size_t>(rank_)] = text;
    }
    std::string read(int rank) noexcept override { return board_->line(rank); }

   private:
    const std::shared_ptr<MemoryBoard> board_;
    const int rank_;
  };

  std::string line(int rank) {
    const std::scoped_lock lock(mutex);
    return lines[static_cast<std::size_t>(rank)];
  }

  std::mutex mutex;
  std::vector<std::string> lines;
};

}  // namespace tradewind
