#include "share/hosts.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"

namespace tradewind {

Hosts Hosts::make(const std::vector<std::string>& key_of_rank) {
  Hosts hosts;
  std::unordered_map<std::string, int> host_of_key;
  for (const std::string& key : key_of_rank) {
    const int rank = hosts.num_ranks();
    if (key.empty()) {
      fail(ErrorKind::kBadValue, "hosts: expected a key for every rank, got none for rank ", rank);
    }
    const int host = host_of_key.emplace(key, hosts.num_hosts()).first->second;
    if (host == hosts.num_hosts()) hosts.ranks_of_.emplace_back();
    auto& ranks = hosts.ranks_of_[static_cast<std::size_t>(host)];
    hosts.host_of_.push_back(host);
    hosts.place_of_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(rank);
  }
  return hosts;
}

Hosts Hosts::apart(int num_ranks) {
  Hosts hosts;
  for (int rank = 0; rank < num_ranks; ++rank) {
    hosts.host_of_.push_back(rank);
    hosts.place_of_.push_back(0);
    hosts.ranks_of_.push_back({rank});
  }
  return hosts;
}

bool Hosts::is_even() const {
  return std::all_of(ranks_of_.begin(), ranks_of_.end(), [&](const std::vector<int>& ranks) {
    return ranks.size() == ranks_of_.front().size();
  });
}

}  // namespace tradewind
