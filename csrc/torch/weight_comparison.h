// Whether all ranks still have the same weights. With an optimizer that is not ours, a rank that
// skipped a backward, or ran another one, has others from then on. Parameters that changed more
// often on one rank than on another (which is no error by itself: averages may be swapped in on one
// rank) have weights compared in the next round.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "torch/round_facts.h"

namespace tradewind {

class WeightComparison {
 public:
  WeightComparison(std::vector<at::Tensor> parameters, int world_size);

  // What this rank says in a round. Waits for a device, in the rare round in which ranks compare.
  void say(RoundFacts& facts) const;
  // What ranks said in a round, from the first rank to the last: two that differ, in words, or "".
  void begin();
  std::string hear(int rank, const RoundFacts& facts);
  void end();

 private:
  [[nodiscard]] std::uint32_t num_changes() const;
  [[nodiscard]] std::uint64_t digest() const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::uint32_t> num_changes_of_;  // by rank, in the last round
  int first_present_ = -1;                     // of the ranks that took part in this round
  std::uint32_t num_changed_first_ = 0;        // its changes since the round before
  std::uint64_t digest_of_first_ = 0;          // of its weights, where compared
  bool compares_ = false;                      // in this round
  bool compares_next_ = false;
};

}  // namespace tradewind
