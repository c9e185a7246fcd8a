// Ranks as threads that are said to be on hosts: messages between them are queues in memory, the
// memory and the bells of a host are the real ones. A rank whose Peers are gone is lost.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "share/exchange.h"

namespace tradewind {

struct Queues {
  struct Queue {
    std::vector<std::vector<std::byte>> messages;
    std::size_t num_receives = 0;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, std::uint32_t>, Queue> of;  // from, to, tag
  std::set<int> gone;
};

class SentTransfer final : public Transfer {
 public:
  bool wait() override { return true; }
  void interrupt() noexcept override {}
  void cancel() noexcept override {}
};

class QueuedTransfer final : public Transfer {
 public:
  QueuedTransfer(std::shared_ptr<Queues> queues, int from, Queues::Queue& queue, void* data,
                 std::int64_t size_bytes)
      : queues_(std::move(queues)),
        from_(from),
        queue_(&queue),
        number_(queue.num_receives++),
        data_(data),
        size_bytes_(size_bytes) {}

  bool wait() override {
    std::unique_lock lock(queues_->mutex);
    const auto has_come = [&] { return queue_->messages.size() > number_; };
    queues_->changed.wait(lock, [&] {
      return has_come() || is_interrupted_ || is_cancelled_ || queues_->gone.contains(from_);
    });
    if (is_cancelled_) fail(ErrorKind::kPeerLost, "cancelled");
    if (has_come()) {
      const auto message = std::exchange(queue_->messages[number_], {});
      EXPECT_EQ(static_cast<std::int64_t>(message.size()), size_bytes_);
      std::memcpy(data_, message.data(), message.size());
      return true;
    }
    if (std::exchange(is_interrupted_, false)) return false;
    fail(ErrorKind::kPeerLost, "its connection is closed");
  }
  void interrupt() noexcept override { set(is_interrupted_); }
  void cancel() noexcept override { set(is_cancelled_); }

 private:
  void set(bool& what) noexcept {
    const std::scoped_lock lock(queues_->mutex);
    what = true;
    queues_->changed.notify_all();
  }

  std::shared_ptr<Queues> queues_;
  int from_;
  Queues::Queue* queue_;
  std::size_t number_;
  void* data_;
  std::int64_t size_bytes_;
  bool is_interrupted_ = false, is_cancelled_ = false;
};

class QueuedPeers final : public Peers {
 public:
  QueuedPeers(std::shared_ptr<Queues> queues, int rank, int size)
      : queues_(std::move(queues)), rank_(rank), size_(size) {}
  ~QueuedPeers() override {
    const std::scoped_lock lock(queues_->mutex);
    queues_->gone.insert(rank_);
    queues_->changed.notify_all();
  }
  QueuedPeers(const QueuedPeers&) = delete;
  QueuedPeers& operator=(const QueuedPeers&) = delete;
  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }

  std::unique_ptr<Transfer> send(const void* data, std::int64_t size_bytes, int peer,
                                 std::uint32_t tag) override {
    const auto* bytes = static_cast<const std::byte*>(data);
    const std::scoped_lock lock(queues_->mutex);
    queues_->of[{rank_, peer, tag}].messages.emplace_back(bytes, bytes + size_bytes);
    queues_->changed.notify_all();
    return std::make_unique<SentTransfer>();
  }
  std::unique_ptr<Transfer> receive(void* data, std::int64_t size_bytes, int peer,
                                    std::uint32_t tag) override {
    const std::scoped_lock lock(queues_->mutex);
    return std::make_unique<QueuedTransfer>(queues_, peer, queues_->of[{peer, rank_, tag}], data,
                                            size_bytes);
  }

 private:
  std::shared_ptr<Queues> queues_;
  int rank_, size_;
};

// What a rank of a test has.
struct HostRank {
  const Layout& layout;
  const Plan& plan;
  int rank;
  std::vector<std::byte*> arenas;
  std::unique_ptr<Exchange> exchange;

  // Every bucket at once, and the result.
  void run_round(int num_ranks, const std::function<void()>& fill) {
    exchange->begin(num_ranks);
    fill();
    for (std::size_t bucket = 0; bucket < plan.buckets().size(); ++bucket) {
      exchange->ready(static_cast<std::int32_t>(bucket));
    }
    exchange->wait_all();
  }
  template <class T>
  [[nodiscard]] std::span<T> values(std::int64_t slot_idx = 0) const {
    const Slot& slot = layout.slots()[static_cast<std::size_t>(slot_idx)];
    std::byte* arena = arenas[static_cast<std::size_t>(slot.arena_idx)];
    return {reinterpret_cast<T*>(arena + slot.offset_bytes),
            static_cast<std::size_t>(slot.num_elements)};
  }
};

struct HostRanks {
  std::vector<std::string> keys;  // of each rank's host
  std::vector<SlotSpec> slots;
  PlanOptions plan;
  Exchange::Options exchange;
  Exchange::Callbacks callbacks;
  bool is_flat = false;

  [[nodiscard]] int size() const { return static_cast<int>(keys.size()); }

  // Runs body on a thread for every rank; what it throws fails the test.
  void run(const std::function<void(HostRank&)>& body) const {
    static std::atomic<int> num_runs{0};
    const std::string name =
        "tradewind-" + std::to_string(getpid()) + "-run-" + std::to_string(++num_runs) + "-";
    const Layout layout = Layout::make(slots);
    const Plan made = Plan::make(layout, size(), plan);
    const auto queues = std::make_shared<Queues>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          run_rank(name, layout, made, queues, rank, body);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void run_rank(const std::string& name, const Layout& layout, const Plan& made,
                const std::shared_ptr<Queues>& queues, int rank,
                const std::function<void(HostRank&)>& body) const {
    Exchange::Options options = exchange;
    options.hosts = Hosts::make(keys);
    std::vector<std::string> sockets;
    for (int one = 0; one < size(); ++one) sockets.push_back(name + std::to_string(one));
    std::vector<std::vector<std::byte>> own;
    HostRank made_rank{layout, made, rank, {}, nullptr};
    if (!is_flat) {
      options.neighbours =
          meet_neighbours(layout, made, options.hosts, sockets, rank,
                          std::chrono::steady_clock::now() + std::chrono::seconds(10));
    }
    for (std::size_t arena = 0; arena < layout.arenas().size(); ++arena) {
      if (is_flat) own.emplace_back(static_cast<std::size_t>(layout.arenas()[arena].size_bytes));
      made_rank.arenas.push_back(
          is_flat ? own.back().data()
                  : options.neighbours->arena(options.neighbours->own_place(), arena));
    }
    const Exchange::Memory memory{&layout, made_rank.arenas};
    made_rank.exchange = std::make_unique<Exchange>(
        made, memory, memory, std::make_shared<QueuedPeers>(queues, rank, size()), nullptr, options,
        callbacks, std::vector<std::vector<std::int64_t>>{});
    body(made_rank);
  }
};

}  // namespace tradewind
