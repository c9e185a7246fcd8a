// A table of slots of mixed dtypes, rules and lengths that owns its memory: copies start from the
// same bytes, and equal tables hold the same bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "step/rule_options.h"
#include "step/rules/all.h"
#include "step/sample_values.h"
#include "step/sweep.h"

namespace tradewind {

class SlotTable {
 public:
  struct Entry {
    DType dtype;
    int rule_idx;
    std::int64_t num_elements;
    double sign;
    std::array<std::vector<std::byte>, 2 + kMaxStates> arrays;  // parameter, gradient, states
    friend bool operator==(const Entry&, const Entry&) = default;
  };

  void add(DType dtype, int rule_idx, std::int64_t num_elements, double sign = 1.0) {
    Entry entry{dtype, rule_idx, num_elements, sign, {}};
    const std::size_t num_arrays = 2 + rule_of(entry).state_names.size();
    for (std::size_t i = 0; i < num_arrays; ++i) {
      visit_format(dtype, [&]<class Format>() {
        const std::uint64_t seed = entries_.size() * 10 + i;
        const auto count = static_cast<std::size_t>(num_elements);
        const auto values =
            i < 3 ? sample_values<Format>(seed, count) : sample_magnitudes<Format>(seed, count);
        entry.arrays[i].resize(count * sizeof(typename Format::Stored));
        if (count > 0) std::memcpy(entry.arrays[i].data(), values.data(), entry.arrays[i].size());
      });
    }
    entries_.push_back(std::move(entry));
  }

  static SlotTable mixed() {
    SlotTable table;
    int idx = 0;
    for (const std::int64_t length : {0, 1, 5000, 4096, 0, 0, 31, 40000, 8191, 2, 4097, 100, 0}) {
      for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype, ++idx) {
        table.add(static_cast<DType>(dtype), idx % num_rules(), length, idx % 3 == 0 ? -1.0 : 1.0);
      }
      ++idx;  // so that every dtype meets every rule
    }
    return table;
  }

  std::vector<SweepSlot> slots() {
    std::vector<SweepSlot> slots;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      Entry& entry = entries_[i];
      SweepSlot slot{entry.dtype, entry.arrays[0].data(),      entry.arrays[1].data(),
                     {},          entry.num_elements,          entry.rule_idx,
                     entry.sign,  static_cast<std::int64_t>(i)};
      for (std::size_t s = 0; s < kMaxStates; ++s) {
        auto& state = entry.arrays[2 + s];
        slot.states[s] = state.empty() ? nullptr : state.data();
      }
      slots.push_back(slot);
    }
    return slots;
  }

  [[nodiscard]] std::vector<ScalarBlock> scalars() const {
    std::vector<ScalarBlock> blocks;
    for (const Entry& entry : entries_) {
      const RuleInfo& rule = rule_of(entry);
      blocks.push_back(scalars_for(rule, entry.dtype, example_options(rule, false), 3, false));
    }
    return blocks;
  }

  std::vector<Entry>& entries() { return entries_; }
  template <class T>
  T* gradient(std::size_t slot_idx) {
    return reinterpret_cast<T*>(entries_[slot_idx].arrays[1].data());
  }
  friend bool operator==(const SlotTable&, const SlotTable&) = default;

 private:
  static const RuleInfo& rule_of(const Entry& entry) {
    return rules()[static_cast<std::size_t>(entry.rule_idx)];
  }

  std::vector<Entry> entries_;
};

}  // namespace tradewind
