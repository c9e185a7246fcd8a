// Messages between the ranks of one exchange, and what each rank says of itself. An implementation
// owns its connections; whoever calls owns the memory that travels, and keeps it until the transfer
// is over. Any thread may call; between two ranks, messages of one tag arrive in the order sent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace tradewind {

// One message under way. Destroying one that is not over gives it up: its memory may be touched
// until the Peers that made it are gone.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Returns true once the memory may be used again, which is said once; false where interrupt()
  // came first. One thread at a time. Throws Error(kPeerLost) where the peer is gone or the
  // transfer was cancelled.
  virtual bool wait() = 0;
  // From any thread: makes a wait() under way, or the next one, return.
  virtual void interrupt() noexcept = 0;
  // From any thread: makes a wait() under way, and any later one, throw.
  virtual void cancel() noexcept = 0;
};

class Peers {
 public:
  virtual ~Peers() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  virtual std::unique_ptr<Transfer> send(const void* data, std::int64_t size_bytes, int peer,
                                         std::uint32_t tag) = 0;
  virtual std::unique_ptr<Transfer> receive(void* data, std::int64_t size_bytes, int peer,
                                            std::uint32_t tag) = 0;
};

// Where ranks post what they are doing, so that an error can say it of the one that is missing.
class Board {
 public:
  virtual ~Board() = default;
  virtual void post(const std::string& text) noexcept = 0;
  // What a rank posted last; empty where it cannot be known within a moment.
  virtual std::string read(int rank) noexcept = 0;
};

}  // namespace tradewind
