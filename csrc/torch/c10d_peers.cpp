// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include "torch/c10d_peers.h"

#include <ATen/ops/from_blob.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/error.h"
#include "share/deadline.h"

namespace tradewind {
namespace {

// Deadlines are the Exchange's, which names what is late; c10d's own would close the connection.
constexpr std::chrono::hours kForEver{24 * 30};
// A store whose process is stopped answers nothing, and who asks it would miss every deadline.
constexpr std::chrono::milliseconds kMoment{300};

class C10dTransfer final : public Transfer {
 public:
  explicit C10dTransfer(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  bool wait() override {
    bool is_over = false;
    try {
      is_over = work_->wait(std::chrono::duration_cast<std::chrono::milliseconds>(kForEver));
    } catch (const std::exception& error) {
      fail(ErrorKind::kPeerLost, error.what());
    }
    if (!is_over && is_cancelled_.load()) fail(ErrorKind::kPeerLost, "the transfer was cancelled");
    return is_over;
  }

  // Gloo's abort ends one wait, and leaves the transfer as it is.
  void interrupt() noexcept override {
    try {
      work_->abort();
    } catch (...) {  // over already
    }
  }

  void cancel() noexcept override {
    is_cancelled_.store(true);
    interrupt();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::atomic<bool> is_cancelled_{false};
};

class C10dPeers final : public Peers {
 public:
  explicit C10dPeers(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  [[nodiscard]] int rank() const override { return backend_->getRank(); }
  [[nodiscard]] int size() const override { return backend_->getSize(); }

  std::unique_ptr<Transfer> send(const void* data, std::int64_t size_bytes, int peer,
                                 std::uint32_t tag) override {
    // SAFETY: Gloo only reads what it sends.
    std::vector<at::Tensor> tensors{bytes_at(const_cast<void*>(data), size_bytes)};
    return begun([&] { return backend_->send(tensors, peer, static_cast<int>(tag)); });
  }

  std::unique_ptr<Transfer> receive(void* data, std::int64_t size_bytes, int peer,
                                    std::uint32_t tag) override {
    std::vector<at::Tensor> tensors{bytes_at(data, size_bytes)};
    return begun([&] { return backend_->recv(tensors, peer, static_cast<int>(tag)); });
  }

 private:
  // Gloo throws its own where the connection is gone already.
  template <class Begin>
  std::unique_ptr<Transfer> begun(const Begin& begin) {
    const std::scoped_lock lock(mutex_);
    try {
      return std::make_unique<C10dTransfer>(begin());
    } catch (const std::exception& error) {
      fail(ErrorKind::kPeerLost, error.what());
    }
  }

  static at::Tensor bytes_at(void* data, std::int64_t size_bytes) {
    return at::from_blob(data, {size_bytes}, at::TensorOptions().dtype(at::kByte));
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
};

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

class C10dBoard final : public Board {
 public:
  C10dBoard(c10::intrusive_ptr<c10d::Store> store, int rank, std::string prefix)
      : store_(std::move(store)), rank_(rank), prefix_(std::move(prefix)) {}

  void post(const std::string& text) noexcept override {
    try {
      const std::string line = std::to_string(now_ms()) + " " + text;
      const std::vector<std::uint8_t> bytes(line.begin(), line.end());
      (void)ask([store = store_, key = key(rank_), bytes] { store->set(key, bytes); });
    } catch (...) {  // whoever held the store is gone; the exchange itself will say so
    }
  }

  std::string read(int rank) noexcept override {
    try {
      const auto answer = std::make_shared<std::string>();
      const bool is_there = ask([store = store_, key = key(rank), answer] {
        if (!store->check({key})) return;
        const std::vector<std::uint8_t> bytes = store->get(key);
        answer->assign(bytes.begin(), bytes.end());
      });
      if (!is_there || answer->empty()) return "";
      const std::string& line = *answer;
      const auto space = line.find(' ');
      std::ostringstream text;
      text.precision(3);
      text << line.substr(space + 1) << ", "
           << static_cast<double>(now_ms() - std::stoll(line.substr(0, space))) / 1000.0
           << " s ago";
      return text.str();
    } catch (...) {
      return "";
    }
  }

 private:
  // Whether the call returned within a moment. One that did not is left behind, and until it
  // returns nothing else is asked: it holds the connection. The call owns what it touches.
  template <class Call>
  bool ask(Call call) {
    if (num_left_behind_->load() > 0) return false;
    enum Phase : int { kAsked, kAnswered, kLeftBehind };
    const auto phase = std::make_shared<std::atomic<int>>(kAsked);
    const auto deadline = std::chrono::steady_clock::now() + kMoment;
    const bool is_answered =
        returns_within(deadline, [call = std::move(call), phase, left = num_left_behind_] {
          try {
            call();
          } catch (...) {  // whoever held the store is gone
          }
          if (phase->exchange(kAnswered) == kLeftBehind) left->fetch_sub(1);
        });
    if (is_answered || phase->exchange(kLeftBehind) == kAnswered) return true;
    num_left_behind_->fetch_add(1);
    return false;
  }

  [[nodiscard]] std::string key(int rank) const {
    return prefix_ + "/board/" + std::to_string(rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::string prefix_;
  std::shared_ptr<std::atomic<int>> num_left_behind_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace

std::shared_ptr<Peers> make_c10d_peers(c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_shared<C10dPeers>(std::move(backend));
}

std::shared_ptr<Board> make_c10d_board(c10::intrusive_ptr<c10d::Store> store, int rank,
                                       std::string prefix) {
  return std::make_shared<C10dBoard>(std::move(store), rank, std::move(prefix));
}

}  // namespace tradewind
