#include "torch/weight_comparison.h"

#include <sstream>
#include <utility>

#include "torch/slot_tensor.h"

namespace tradewind {

WeightComparison::WeightComparison(std::vector<at::Tensor> parameters, int world_size)
    : parameters_(std::move(parameters)), num_changes_of_(static_cast<std::size_t>(world_size)) {}

void WeightComparison::say(RoundFacts& facts) const {
  facts.num_changes = num_changes();
  if (compares_) facts.weights_digest = digest();
}

void WeightComparison::begin() { first_present_ = -1; }

std::string WeightComparison::hear(int rank, const RoundFacts& facts) {
  if (!facts.is_present) return "";  // has no data left, and takes no part in updates
  const std::uint32_t changed =
      facts.num_changes -
      std::exchange(num_changes_of_[static_cast<std::size_t>(rank)], facts.num_changes);
  if (first_present_ < 0) {
    first_present_ = rank;
    num_changed_first_ = changed;
    digest_of_first_ = facts.weights_digest;
  }
  if (changed != num_changed_first_) compares_next_ = true;
  if (!compares_ || facts.weights_digest == digest_of_first_) return "";
  std::ostringstream text;
  text << "rank " << first_present_ << " and rank " << rank << " have other weights than each "
       << "other: one of them has skipped a backward that shares, or run another one; all ranks "
       << "end";
  return text.str();
}

void WeightComparison::end() { compares_ = std::exchange(compares_next_, false); }

std::uint32_t WeightComparison::num_changes() const {
  std::uint32_t sum = 0;
  for (const at::Tensor& parameter : parameters_) {
    sum += static_cast<std::uint32_t>(parameter._version());
  }
  return sum;
}

std::uint64_t WeightComparison::digest() const {
  constexpr std::uint64_t kPrime = 1099511628211ULL;  // FNV-1a
  std::uint64_t digest = 14695981039346656037ULL;
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor values = dense_like(parameter).cpu();
    const auto* bytes = static_cast<const std::uint8_t*>(values.const_data_ptr());
    for (std::size_t i = 0; i < values.nbytes(); ++i) digest = (digest ^ bytes[i]) * kPrime;
  }
  return digest;
}

}  // namespace tradewind
