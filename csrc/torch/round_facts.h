// What every rank says of a round of shared gradients once its backward has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tradewind {

struct RoundFacts {
  std::int64_t num_nonfinite = 0;  // parameters whose gradient is not finite
  std::int64_t first_nonfinite = -1;
  std::int64_t microbatch = 0;
  std::uint64_t weights_digest = 0;   // where ranks compare
  std::uint32_t num_changes = 0;      // of parameters in place, so far
  bool is_present = true;             // has data
  bool has_next = true;               // and will have some in the next round
  std::uint8_t wishes = 0;            // a bit for each; what they mean is its user's affair
  std::vector<std::uint8_t> is_used;  // by parameter: whether backward reached it
  // Of buckets; only rank 0's count. `urgency` may be empty.
  std::vector<std::int32_t> order;
  std::vector<std::int32_t> urgency;

  [[nodiscard]] static std::int64_t packed_bytes(std::size_t num_parameters,
                                                 std::size_t num_buckets);
  [[nodiscard]] std::vector<std::byte> packed() const;
  // `bytes`: packed_bytes() of them.
  static RoundFacts unpacked(std::span<const std::byte> bytes, std::size_t num_parameters,
                             std::size_t num_buckets);
};

}  // namespace tradewind
