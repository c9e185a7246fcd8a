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

namespace tradewind {
namespace {

// Deadlines are the Exchange's, which names what is late; c10d's own would close the connection.
constexpr std::chrono::hours kForEver{24 * 30};

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
    const std::scoped_lock lock(mutex_);
    return std::make_unique<C10dTransfer>(backend_->send(tensors, peer, static_cast<int>(tag)));
  }

  std::unique_ptr<Transfer> receive(void* data, std::int64_t size_bytes, int peer,
                                    std::uint32_t tag) override {
    std::vector<at::Tensor> tensors{bytes_at(data, size_bytes)};
    const std::scoped_lock lock(mutex_);
    return std::make_unique<C10dTransfer>(backend_->recv(tensors, peer, static_cast<int>(tag)));
  }

 private:
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
      store_->set(key(rank_), std::vector<std::uint8_t>(line.begin(), line.end()));
    } catch (...) {  // whoever held the store is gone; the exchange itself will say so
    }
  }

  std::string read(int rank) noexcept override {
    try {
      if (!store_->check({key(rank)})) return "";
      const std::vector<std::uint8_t> bytes = store_->get(key(rank));
      const std::string line(bytes.begin(), bytes.end());
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
  [[nodiscard]] std::string key(int rank) const {
    return prefix_ + "/board/" + std::to_string(rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::string prefix_;
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
