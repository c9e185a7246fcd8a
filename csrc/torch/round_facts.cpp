#include "torch/round_facts.h"

#include <cstring>

namespace tradewind {
namespace {

// Followed by a bit for each parameter, and order and urgency of buckets.
struct Header {
  std::int64_t num_nonfinite;
  std::int64_t first_nonfinite;
  std::int64_t microbatch;
  std::uint64_t weights_digest;
  std::uint32_t num_changes;
  std::uint8_t is_present;
  std::uint8_t has_next;
  std::uint8_t has_urgency;
  std::uint8_t wishes;
};

std::size_t bitmap_bytes(std::size_t num_parameters) { return (num_parameters + 7) / 8; }

}  // namespace

std::int64_t RoundFacts::packed_bytes(std::size_t num_parameters, std::size_t num_buckets) {
  return static_cast<std::int64_t>(sizeof(Header) + bitmap_bytes(num_parameters) +
                                   2 * num_buckets * sizeof(std::int32_t));
}

std::vector<std::byte> RoundFacts::packed() const {
  const Header header{num_nonfinite,
                      first_nonfinite,
                      microbatch,
                      weights_digest,
                      num_changes,
                      static_cast<std::uint8_t>(is_present ? 1 : 0),
                      static_cast<std::uint8_t>(has_next ? 1 : 0),
                      static_cast<std::uint8_t>(urgency.empty() ? 0 : 1),
                      wishes};
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(packed_bytes(is_used.size(), order.size())));
  std::memcpy(bytes.data(), &header, sizeof(Header));
  std::byte* bitmap = bytes.data() + sizeof(Header);
  for (std::size_t i = 0; i < is_used.size(); ++i) {
    if (is_used[i] != 0) bitmap[i / 8] |= std::byte{1} << (i % 8);
  }
  const std::size_t order_bytes = order.size() * sizeof(std::int32_t);
  std::byte* there = bitmap + bitmap_bytes(is_used.size());
  std::memcpy(there, order.data(), order_bytes);
  if (!urgency.empty()) std::memcpy(there + order_bytes, urgency.data(), order_bytes);
  return bytes;
}

RoundFacts RoundFacts::unpacked(std::span<const std::byte> bytes, std::size_t num_parameters,
                                std::size_t num_buckets) {
  Header header{};
  std::memcpy(&header, bytes.data(), sizeof(Header));
  RoundFacts facts;
  facts.num_nonfinite = header.num_nonfinite;
  facts.first_nonfinite = header.first_nonfinite;
  facts.microbatch = header.microbatch;
  facts.weights_digest = header.weights_digest;
  facts.num_changes = header.num_changes;
  facts.is_present = header.is_present != 0;
  facts.has_next = header.has_next != 0;
  facts.wishes = header.wishes;
  const std::byte* bitmap = bytes.data() + sizeof(Header);
  facts.is_used.resize(num_parameters);
  for (std::size_t i = 0; i < num_parameters; ++i) {
    facts.is_used[i] = (bitmap[i / 8] & (std::byte{1} << (i % 8))) != std::byte{0} ? 1 : 0;
  }
  const std::size_t order_bytes = num_buckets * sizeof(std::int32_t);
  const std::byte* there = bitmap + bitmap_bytes(num_parameters);
  facts.order.resize(num_buckets);
  std::memcpy(facts.order.data(), there, order_bytes);
  if (header.has_urgency != 0) {
    facts.urgency.resize(num_buckets);
    std::memcpy(facts.urgency.data(), there + order_bytes, order_bytes);
  }
  return facts;
}

}  // namespace tradewind
