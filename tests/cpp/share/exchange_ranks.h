// Ranks of an exchange as threads of one process, their gradients, and what their means must be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/split_mix.h"
#include "share/exchange.h"
#include "share/mailbox_peers.h"
#include "step/stored_formats.h"

namespace tradewind {

using Arenas = std::vector<std::vector<std::byte>>;

inline Arenas arenas_of(const Layout& layout) {
  Arenas arenas;
  for (const ArenaSpec& arena : layout.arenas()) {
    arenas.emplace_back(static_cast<std::size_t>(arena.size_bytes));
  }
  return arenas;
}

inline Exchange::Memory memory_of(const Layout& layout, Arenas& arenas) {
  Exchange::Memory memory{&layout, {}};
  for (auto& arena : arenas) memory.arenas.push_back(arena.data());
  return memory;
}

inline void fill_all(Arenas& arenas, std::byte value) {
  for (auto& arena : arenas) std::memset(arena.data(), static_cast<int>(value), arena.size());
}

// Slots of many sizes, with empty ones, in these dtypes by turns.
inline std::vector<SlotSpec> sample_slots(const std::vector<DType>& dtypes) {
  constexpr std::int64_t kSizes[] = {20000, 3, 0, 70001, 4096, 1, 30000, 8191, 0, 12288};
  std::vector<SlotSpec> specs;
  for (const std::int64_t size : kSizes) {
    const DType dtype = dtypes[specs.size() % dtypes.size()];
    specs.push_back({"slot" + std::to_string(specs.size()), {size}, dtype});
  }
  return specs;
}

struct ExchangeCase {
  int num_ranks = 2;
  std::vector<SlotSpec> specs = sample_slots({DType::kFloat32});
  // Several buckets, of one to several pieces.
  PlanOptions plan{.bucket_bytes = 40'000, .end_bucket_bytes = 20'000, .piece_bytes = 1};
  Exchange::Options options;
  MailboxOptions mailbox;
  std::vector<std::vector<std::int64_t>> channel_bytes;
};

// Calls `body` on a thread for each rank. What each threw, empty where it returned.
inline std::vector<std::optional<Error>> errors_of_ranks(int num_ranks,
                                                         const std::function<void(int)>& body) {
  std::vector<std::optional<Error>> errors(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void run_ranks(int num_ranks, const std::function<void(int)>& body) {
  for (const auto& error : errors_of_ranks(num_ranks, body)) {
    if (error) ADD_FAILURE() << error->what();
  }
}

class ExchangeRanks {
 public:
  explicit ExchangeRanks(ExchangeCase input)
      : input_(std::move(input)),
        layout_(Layout::make(input_.specs)),
        plan_(Plan::make(layout_, input_.num_ranks, input_.plan)),
        network_(std::make_shared<MailboxNetwork>(input_.num_ranks, input_.mailbox)),
        board_(std::make_shared<MemoryBoard>(input_.num_ranks)),
        gradients_(static_cast<std::size_t>(input_.num_ranks), arenas_of(layout_)) {}

  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] int size() const { return input_.num_ranks; }
  [[nodiscard]] auto num_buckets() const {
    return static_cast<std::int32_t>(plan_.buckets().size());
  }
  [[nodiscard]] MailboxNetwork& network() { return *network_; }
  [[nodiscard]] MemoryBoard& board() { return *board_; }
  [[nodiscard]] Arenas& gradients(int rank) { return gradients_[static_cast<std::size_t>(rank)]; }

  std::unique_ptr<Exchange> join(int rank, Exchange::Callbacks callbacks = {}) {
    return join(rank, std::move(callbacks), memory_of(layout_, gradients(rank)));
  }
  std::unique_ptr<Exchange> join(int rank, Exchange::Callbacks callbacks,
                                 Exchange::Memory gathered) {
    return std::make_unique<Exchange>(plan_, memory_of(layout_, gradients(rank)),
                                      std::move(gathered), network_->connect(rank),
                                      std::make_shared<MemoryBoard::Side>(board_, rank),
                                      input_.options, std::move(callbacks), input_.channel_bytes);
  }

  // Gradients of a round: different for every rank, round and place.
  void fill(int rank, int round) {
    for_slots(gradients(rank), [&]<class Type>(typename Type::Stored* values,
                                               std::int64_t num_elements, std::size_t slot_idx) {
      repeat(sample_row<Type>(rank, round, slot_idx), values, num_elements);
    });
  }

  // Added in the order of ranks and divided in float32 (float64 where gradients are), rounded once.
  [[nodiscard]] Arenas means(int round, std::int64_t num_contributors) const {
    Arenas means = arenas_of(layout_);
    for_slots(means, [&]<class Type>(typename Type::Stored* values, std::int64_t num_elements,
                                     std::size_t slot_idx) {
      std::vector<typename Type::Compute> sums(kPeriod);
      for (int rank = 0; rank < size(); ++rank) {
        const auto row = sample_row<Type>(rank, round, slot_idx);
        for (std::size_t i = 0; i < kPeriod; ++i) {
          sums[i] = rank == 0 ? Type::decode(row[i]) : sums[i] + Type::decode(row[i]);
        }
      }
      std::vector<typename Type::Stored> row;
      for (const auto sum : sums) {
        const auto mean = sum / static_cast<typename Type::Compute>(num_contributors);
        row.push_back(Type::encode(static_cast<double>(mean)));
      }
      repeat(row, values, num_elements);
    });
    return means;
  }

  // Calls visit.operator()<Type>(values, num_elements, slot_idx) for each slot.
  template <class Visit>
  void for_slots(Arenas& arenas, const Visit& visit) const {
    for (std::size_t s = 0; s < layout_.slots().size(); ++s) {
      const Slot& slot = layout_.slots()[s];
      std::byte* begin =
          arenas[static_cast<std::size_t>(slot.arena_idx)].data() + slot.offset_bytes;
      visit_format(slot.dtype, [&]<class Type>() {
        visit.template operator()<Type>(reinterpret_cast<typename Type::Stored*>(begin),
                                        slot.num_elements, s);
      });
    }
  }

  // Whether all slots' bytes are alike; paddings may differ.
  [[nodiscard]] bool are_equal(const Arenas& a, const Arenas& b) const {
    return std::all_of(layout_.slots().begin(), layout_.slots().end(), [&](const Slot& slot) {
      const auto arena = static_cast<std::size_t>(slot.arena_idx);
      return slot.num_elements == 0 ||
             std::memcmp(a[arena].data() + slot.offset_bytes, b[arena].data() + slot.offset_bytes,
                         static_cast<std::size_t>(slot.size_bytes())) == 0;
    });
  }

  // What a rank puts on the wire in a round.
  [[nodiscard]] std::int64_t sent_bytes(int rank) const {
    const Codec codec = input_.options.codec;
    std::int64_t total = 0;
    for (const PlanPiece& piece : plan_.pieces()) {
      for (int owner = 0; owner < size(); ++owner) {
        const auto r = static_cast<std::size_t>(owner);
        const DType dtype = layout_.slots()[static_cast<std::size_t>(piece.cuts[r].slot_idx)].dtype;
        const std::int64_t bytes =
            range_between(layout_, piece.cuts[r], piece.cuts[r + 1]).size_bytes();
        total += wire_bytes(codec, dtype, bytes / element_bytes(dtype)) *
                 (owner == rank ? size() - 1 : 1);
      }
    }
    for (const auto& channel : input_.channel_bytes) {
      total += channel[static_cast<std::size_t>(rank)] * (size() - 1);
    }
    return total;
  }

 private:
  // After as many elements as no block, shard or piece has, a slot's gradients repeat.
  static constexpr std::size_t kPeriod = 1009;

  template <class Type>
  static std::vector<typename Type::Stored> sample_row(int rank, int round, std::size_t slot_idx) {
    static const std::vector<typename Type::Stored> table = [] {
      SplitMix random(7);
      std::vector<typename Type::Stored> values(kPeriod);
      for (auto& value : values) value = Type::encode(random.uniform());
      return values;
    }();
    const auto from = (slot_idx * 53 + static_cast<std::size_t>(rank * 131 + round * 37)) % kPeriod;
    std::vector<typename Type::Stored> row(table);
    std::rotate(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(from), row.end());
    return row;
  }

  template <class Stored>
  static void repeat(const std::vector<Stored>& row, Stored* values, std::int64_t num_elements) {
    for (std::int64_t i = 0; i < num_elements; i += static_cast<std::int64_t>(row.size())) {
      const auto count = std::min(num_elements - i, static_cast<std::int64_t>(row.size()));
      std::memcpy(values + i, row.data(), static_cast<std::size_t>(count) * sizeof(Stored));
    }
  }

  const ExchangeCase input_;
  const Layout layout_;
  const Plan plan_;
  const std::shared_ptr<MailboxNetwork> network_;
  const std::shared_ptr<MemoryBoard> board_;
  std::vector<Arenas> gradients_;
};

inline std::vector<std::int32_t> shuffled_buckets(std::int32_t num_buckets, std::uint64_t seed) {
  std::vector<std::int32_t> buckets;
  for (std::int32_t bucket = 0; bucket < num_buckets; ++bucket) buckets.push_back(bucket);
  SplitMix random(seed);
  for (std::size_t i = buckets.size(); i > 1; --i) {
    std::swap(buckets[i - 1],
              buckets[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  return buckets;
}

}  // namespace tradewind
