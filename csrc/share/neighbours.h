// The ranks of one host, as one of them sees them: each one's arenas, which all of them map and may
// read and write by agreement, and each one's words, by which they agree. A word is written by its
// rank alone and only grows; what a rank wrote anywhere before it announced a word is seen by
// whoever saw the word. Any thread may call. Meets when constructed; see HostLinks and HostMemory
// for what lies beneath.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "share/host_links.h"
#include "share/host_memory.h"

namespace tradewind {

class Neighbours {
 public:
  // The same sizes on every rank of the host. Throws Error(kPeerLost) naming who did not come by
  // the deadline, Error(kOutOfMemory), Error(kBadState) where the system refuses.
  Neighbours(HostLinks::Options options, const std::vector<std::int64_t>& arena_bytes,
             std::int64_t num_words);
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  [[nodiscard]] int num_places() const { return links_.num_places(); }
  [[nodiscard]] int own_place() const { return links_.own_place(); }
  [[nodiscard]] int rank_at(int place) const { return links_.rank_at(place); }

  // Zeros at first; aligned to 4096 bytes.
  [[nodiscard]] std::byte* arena(int place, std::size_t arena_idx) const;
  // This rank's memory, for who must outlive this.
  [[nodiscard]] std::shared_ptr<const HostMemory> own_memory() const { return own_; }

  // Sets this rank's word, and wakes the neighbours.
  void announce(std::int64_t word_idx, std::uint64_t value) noexcept;
  [[nodiscard]] std::uint64_t word(int place, std::int64_t word_idx) const noexcept;
  // Until somebody announced or is gone; see HostLinks.
  bool wait() { return links_.wait(); }
  [[nodiscard]] bool is_gone(int place) const noexcept { return links_.is_gone(place); }
  void hang_up() noexcept { links_.hang_up(); }

 private:
  [[nodiscard]] std::byte* memory(int place) const;

  HostLinks links_;
  std::vector<std::int64_t> offsets_;  // of arenas in a rank's memory, behind the words
  std::shared_ptr<HostMemory> own_;
  std::vector<std::unique_ptr<HostMemory>> theirs_;  // by place, null for this rank's
};

}  // namespace tradewind
