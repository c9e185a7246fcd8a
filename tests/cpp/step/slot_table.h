// A table of slots of mixed formats, rules and lengths that owns its memory: copies start from the
// same bytes, and equal tables hold the same bytes.
#pragma once

#include <vector>

#include "step/expected_update.h"
#include "step/sweep.h"

namespace tradewind {

// One for each way that a slot can be stored.
inline std::vector<Storage> example_storages() {
  using enum Format;
  return {{kFloat32, Master::kNone, kFloat32, {}},
          {kBFloat16, Master::kNone, kBFloat16, {kBFloat16, kBFloat16, kBFloat16}},
          uniform_storage(kFloat64),
          {kFloat16, Master::kFloat32, kFloat16, {}},
          {kBFloat16, Master::kSplit, kBFloat16, {kSigned8, kSigned8, kSigned8}},
          {kFloat32, Master::kNone, kFloat32, {kSigned8, kSigned8, kSigned8}},
          {kBFloat16, Master::kFloat32, kFloat32, {kStochasticBFloat16, kSigned8, kFloat32}},
          {kFloat16, Master::kNone, kFloat32, {kStochasticBFloat16, kStochasticBFloat16}},
          {kFloat64, Master::kNone, kFloat16, {kSigned8, kStochasticBFloat16, kFloat64}}};
}

class SlotTable {
 public:
  struct Entry {
    Storage storage;
    Update update;
    double sign;
    UpdateArrays arrays;

    [[nodiscard]] DType dtype() const { return static_cast<DType>(storage.parameter); }
    [[nodiscard]] std::int64_t num_elements() const {
      return static_cast<std::int64_t>(arrays.parameter.size());
    }
  };

  void add(const Storage& storage, int rule_idx, std::int64_t num_elements, double sign = 1.0) {
    Entry entry{storage, example_updates(rule_idx)[1], sign, {}};
    entry.update.step = 3;
    entry.update.random_key = random_key(11, 3, static_cast<std::int64_t>(entries_.size()));
    entry.arrays = sample_arrays(entry.update.rule(), storage,
                                 static_cast<std::size_t>(num_elements), entries_.size() * 10);
    entry.arrays.direction = {};  // the sweep's own
    entries_.push_back(std::move(entry));
  }
  void add(DType dtype, int rule_idx, std::int64_t num_elements, double sign = 1.0) {
    add(uniform_storage(format_of(dtype)), rule_idx, num_elements, sign);
  }

  // Every storage and every rule, though not each with each; empty slots first, between and last.
  static SlotTable mixed() {
    SlotTable table;
    int idx = 0;
    for (const std::int64_t length : {0, 1, 5000, 4096, 0, 0, 31, 40000, 8191, 2, 4097, 100, 0}) {
      for (const Storage& storage : example_storages()) {
        table.add(storage, idx % num_rules(), length, idx % 3 == 0 ? -1.0 : 1.0);
        idx += 5;  // which shares no factor with the number of rules or of storages
      }
    }
    return table;
  }

  std::vector<SweepSlot> slots() {
    std::vector<SweepSlot> slots;
    for (Entry& entry : entries_) {
      UpdateArrays& arrays = entry.arrays;
      SweepSlot slot;
      slot.dtype = entry.dtype();
      slot.gradient_dtype = static_cast<DType>(entry.storage.gradient);
      slot.master = entry.storage.master;
      slot.parameter = arrays.parameter.bytes.data();
      slot.gradient = arrays.gradient.bytes.data();
      slot.master_data = arrays.master.bytes.empty() ? nullptr : arrays.master.bytes.data();
      for (std::size_t s = 0; s < arrays.states.size(); ++s) {
        slot.states[s] = arrays.states[s].bytes.data();
        slot.state_formats[s] = arrays.states[s].format;
        if (is_blockwise(arrays.states[s].format)) {
          slot.exponents[s] = arrays.states[s].exponents.data();
        }
      }
      slot.num_elements = entry.num_elements();
      slot.rule_idx = entry.update.rule_idx;
      slot.sign = entry.sign;
      slot.scalars_idx = static_cast<std::int64_t>(slots.size());
      slot.random_key = entry.update.random_key;
      slot.matrix_scale = entry.update.scale;
      slots.push_back(slot);
    }
    return slots;
  }

  [[nodiscard]] std::vector<ScalarBlock> scalars() const {
    std::vector<ScalarBlock> blocks;
    for (const Entry& entry : entries_) {
      blocks.push_back(scalars_for(entry.update.rule(), entry.dtype(), entry.update.options,
                                   entry.update.step, entry.update.is_first));
    }
    return blocks;
  }

  std::vector<Entry>& entries() { return entries_; }
  template <class T>
  T* gradient(std::size_t slot_idx) {
    return reinterpret_cast<T*>(entries_[slot_idx].arrays.gradient.bytes.data());
  }
  friend bool operator==(const SlotTable& a, const SlotTable& b) {
    bool is_equal = a.entries_.size() == b.entries_.size();
    for (std::size_t i = 0; is_equal && i < a.entries_.size(); ++i) {
      is_equal = a.entries_[i].arrays == b.entries_[i].arrays;
    }
    return is_equal;
  }

 private:
  std::vector<Entry> entries_;
};

// In place of Newton-Schulz iterations: exact, and needs the whole matrix.
template <class T>
void reverse_and_halve(T* values, std::int64_t count) {
  std::reverse(values, values + count);
  for (std::int64_t i = 0; i < count; ++i) values[i] = values[i] * T(0.5);
}

inline MatrixTransform example_transform(SlotTable& table) {
  return [&table](std::int64_t slot_idx, void* direction) {
    const SlotTable::Entry& entry = table.entries()[static_cast<std::size_t>(slot_idx)];
    if (entry.storage.is_double()) {
      reverse_and_halve(static_cast<double*>(direction), entry.num_elements());
    } else {
      reverse_and_halve(static_cast<float*>(direction), entry.num_elements());
    }
  };
}

}  // namespace tradewind
