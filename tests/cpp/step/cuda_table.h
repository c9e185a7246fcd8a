// A table of slots in host memory that the emulated CUDA library and the CPU's sweep both step. It
// owns its memory: a copy starts from the same bytes at the same alignment, and bytes are compared
// with the guards before and behind each array. Bind it (again) after adding, copying or moving.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "arena/layout.h"
#include "step/cuda/interface.h"
#include "step/cuda_entry.h"
#include "step/rule_options.h"
#include "step/sweep.h"

namespace tradewind {

class CudaTable {
 public:
  CudaTable() { control_.settings.max_norm = -1.0; }  // nothing is clipped
  void add(const CudaSlotSpec& spec) {
    entries_.push_back(sample_entry(spec, 100 * entries_.size() + 1));
  }
  // One group for each rule, of example options.
  void add_groups();
  // Points the C structs at this object's memory and zeroes the scratch, not the control.
  TradewindCudaTable& bind();

  std::vector<CudaEntry>& entries() { return entries_; }
  [[nodiscard]] const std::vector<CudaEntry>& entries() const { return entries_; }
  std::vector<TradewindCudaGroup>& groups() { return groups_; }
  TradewindCudaControl& control() { return control_; }
  TradewindCudaSettings& settings() { return control_.settings; }
  [[nodiscard]] const TradewindCudaOutcome& outcome() const { return control_.outcome; }
  TradewindCudaTable& c() { return table_; }
  [[nodiscard]] std::int64_t num_blocks() const { return first_blocks_.back(); }
  std::vector<TradewindCudaSlot>& slots() { return slots_; }
  std::vector<TradewindCudaMeasure>& block_measures() { return block_measures_; }
  std::vector<TradewindCudaMeasure>& slot_measures() { return slot_measures_; }
  std::vector<TradewindCudaChange>& block_changes() { return block_changes_; }
  std::vector<TradewindCudaChange>& slot_changes() { return slot_changes_; }

 private:
  std::vector<CudaEntry> entries_;
  std::vector<TradewindCudaGroup> groups_;
  TradewindCudaControl control_{};
  TradewindCudaTable table_{};
  std::vector<TradewindCudaSlot> slots_;
  std::vector<std::int64_t> first_blocks_{0};
  std::vector<TradewindCudaMeasure> block_measures_, slot_measures_;
  std::vector<TradewindCudaPlan> plans_;
  std::vector<TradewindCudaChange> block_changes_, slot_changes_;
};

// The listed slots of a table, in the order given.
class CudaList {
 public:
  CudaList(CudaTable& table, std::vector<std::int32_t> slot_idx) : slot_idx_(std::move(slot_idx)) {
    for (const std::int32_t idx : slot_idx_) {
      const auto& spec = table.entries()[static_cast<std::size_t>(idx)].spec;
      first_blocks_.push_back(first_blocks_.back() + num_norm_blocks(spec.num_elements));
    }
    list_ = {slot_idx_.data(), first_blocks_.data(), first_blocks_.back(),
             static_cast<std::int32_t>(slot_idx_.size())};
  }
  CudaList(const CudaList&) = delete;
  CudaList& operator=(const CudaList&) = delete;
  [[nodiscard]] const TradewindCudaList* c() const { return &list_; }

 private:
  std::vector<std::int32_t> slot_idx_;
  std::vector<std::int64_t> first_blocks_{0};
  TradewindCudaList list_{};
};

inline void CudaTable::add_groups() {
  groups_.clear();
  for (const RuleInfo& rule : rules()) {
    TradewindCudaGroup group{};
    const std::vector<double> options = example_options(rule, false);
    std::copy(options.begin(), options.end(), group.options);
    groups_.push_back(group);
  }
}

inline TradewindCudaTable& CudaTable::bind() {
  if (groups_.empty()) add_groups();
  slots_.clear();
  first_blocks_ = {0};
  for (CudaEntry& entry : entries_) {
    const CudaSlotSpec& spec = entry.spec;
    TradewindCudaSlot slot{};
    slot.parameter = entry.parameter.data();
    slot.gradient = entry.gradient.data();
    slot.master = entry.master.data();
    for (std::size_t s = 0; s < kMaxStates; ++s) {
      slot.states[s] = entry.states[s].data();
      slot.exponents[s] = entry.exponents[s].as<std::uint8_t>();
      slot.state_formats[s] = static_cast<std::uint8_t>(spec.states[s]);
    }
    slot.direction = entry.direction.data();
    slot.step = entry.step.as<float>();
    slot.has_stepped = entry.has_stepped.as<std::uint8_t>();
    slot.num_elements = spec.num_elements;
    slot.first_block = first_blocks_.back();
    slot.parameter_idx = 1000 + static_cast<std::int64_t>(slots_.size());
    slot.sign = spec.sign;
    slot.matrix_scale = 0.375;
    slot.rule_idx = slot.group_idx = spec.rule_idx;
    slot.parameter_format = static_cast<std::uint8_t>(spec.parameter);
    slot.gradient_format = static_cast<std::uint8_t>(spec.gradient);
    slot.master_kind = static_cast<std::uint8_t>(spec.master);
    slots_.push_back(slot);
    first_blocks_.push_back(first_blocks_.back() + num_norm_blocks(spec.num_elements));
  }
  const auto num_blocks = static_cast<std::size_t>(first_blocks_.back());
  block_measures_.assign(num_blocks, {});
  slot_measures_.assign(slots_.size(), {});
  plans_.assign(slots_.size(), {});
  block_changes_.assign(num_blocks, {});
  slot_changes_.assign(slots_.size(), {});
  table_ = {slots_.data(),
            first_blocks_.data(),
            groups_.data(),
            &control_,
            block_measures_.data(),
            slot_measures_.data(),
            plans_.data(),
            block_changes_.data(),
            slot_changes_.data(),
            first_blocks_.back(),
            static_cast<std::int32_t>(slots_.size())};
  return table_;
}

// Every byte of every array, guards included, and of the step counts.
inline void expect_same_memory(const CudaTable& expected, const CudaTable& got) {
  ASSERT_EQ(expected.entries().size(), got.entries().size());
  for (std::size_t i = 0; i < got.entries().size(); ++i) {
    const CudaEntry& want = expected.entries()[i];
    const CudaEntry& have = got.entries()[i];
    const auto expect_same = [&](const GuardedBytes& a, const GuardedBytes& b, const char* name) {
      const CudaSlotSpec& spec = want.spec;
      EXPECT_EQ(a.first_difference(b), GuardedBytes::kSame)
          << name << " of slot " << i << ": " << spec.rule().name << ", " << spec.num_elements
          << " elements, parameter " << int(spec.parameter) << ", gradient " << int(spec.gradient)
          << ", master " << int(spec.master) << ", states " << int(spec.states[0]) << " "
          << int(spec.states[1]) << " " << int(spec.states[2]) << ", shift " << spec.shift;
    };
    expect_same(want.parameter, have.parameter, "parameter");
    expect_same(want.gradient, have.gradient, "gradient");
    expect_same(want.master, have.master, "master");
    expect_same(want.step, have.step, "step");
    expect_same(want.has_stepped, have.has_stepped, "has_stepped");
    for (std::size_t s = 0; s < kMaxStates; ++s) {
      expect_same(want.states[s], have.states[s], "state");
      expect_same(want.exponents[s], have.exponents[s], "exponents");
    }
  }
}

}  // namespace tradewind
