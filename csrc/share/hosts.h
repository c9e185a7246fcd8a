// Which ranks share a host. Hosts come in the order of their first ranks, and the ranks of a host
// have places in it, in rank order. Where sums are taken on hosts first, ranks of one place on
// different hosts are opposite each other: between them travel the shards of their place.
// Immutable, so any thread may read it.
#pragma once

#include <string>
#include <vector>

namespace tradewind {

class Hosts {
 public:
  // Ranks with equal keys share a host. Throws Error(kBadValue) for a rank without a key.
  static Hosts make(const std::vector<std::string>& key_of_rank);
  // Every rank has a host of its own.
  static Hosts apart(int num_ranks);

  [[nodiscard]] int num_ranks() const { return static_cast<int>(host_of_.size()); }
  [[nodiscard]] int num_hosts() const { return static_cast<int>(ranks_of_.size()); }
  // Whether all hosts have as many ranks.
  [[nodiscard]] bool is_even() const;
  [[nodiscard]] int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] int place_of(int rank) const { return place_of_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const std::vector<int>& ranks_of(int host) const {
    return ranks_of_[static_cast<std::size_t>(host)];
  }
  [[nodiscard]] bool are_opposite(int a, int b) const {
    return host_of(a) != host_of(b) && place_of(a) == place_of(b);
  }

 private:
  std::vector<int> host_of_, place_of_;  // by rank
  std::vector<std::vector<int>> ranks_of_;
};

}  // namespace tradewind
