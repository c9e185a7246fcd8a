// Runs a sweep kernel on arrays between guards, each at another misalignment, and compares what it
// leaves with what is expected.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "step/expected_update.h"
#include "step/guarded_array.h"

namespace tradewind {

// Bytes of a StoredArray in memory aligned to its elements alone.
class GuardedStored {
 public:
  GuardedStored(const StoredArray& array, std::size_t shift)
      : array_(array),
        bytes_(array.bytes.data(), array.bytes.size(),
               shift * static_cast<std::size_t>(format_bytes(array.format))),
        exponents_(array.exponents.data(), array.exponents.size(), shift) {}

  void* data() { return bytes_.data(); }
  std::uint8_t* exponents() { return array_.exponents.empty() ? nullptr : exponents_.data(); }
  [[nodiscard]] bool guards_are_intact() const {
    return bytes_.guards_are_intact() && exponents_.guards_are_intact();
  }
  StoredArray array() {
    std::copy_n(bytes_.data(), array_.bytes.size(), array_.bytes.begin());
    std::copy_n(exponents_.data(), array_.exponents.size(), array_.exponents.begin());
    return array_;
  }

 private:
  StoredArray array_;
  GuardedArray<std::byte> bytes_;
  GuardedArray<std::uint8_t> exponents_;
};

inline SweepKernel kernel_of(const Kernels& kernels, const Storage& storage, const Update& update,
                             Phase phase) {
  return kernels.sweep[update.rule_idx][storage.is_double() ? 1 : 0][static_cast<int>(phase)];
}

inline std::vector<Phase> phases_of(const RuleInfo& rule) {
  return rule.needs == Needs::kElement ? std::vector{Phase::kUpdate}
                                       : std::vector{Phase::kUpdate, Phase::kFinish};
}

struct KernelCase {
  const Kernels& kernels;
  Storage storage;
  Update update;
  Phase phase = Phase::kUpdate;
  std::size_t shift = 0;
};

// What the kernel leaves in `before`. Sums go to `changes` where it is not null.
inline UpdateArrays run_kernel(const KernelCase& c, const UpdateArrays& before,
                               std::vector<BlockChange>* changes) {
  const std::size_t count = before.parameter.size();
  std::vector<GuardedStored> guarded;
  std::size_t places = 0;
  const auto place = [&](const StoredArray& array) {
    guarded.emplace_back(array, c.shift * (2 * places++ + 1));
  };
  place(before.parameter);
  place(before.master);
  place(before.gradient);
  place(before.direction);
  for (const StoredArray& state : before.states) place(state);
  const DType compute = c.storage.is_double() ? DType::kFloat64 : DType::kFloat32;
  const ScalarBlock scalars =
      scalars_for(c.update.rule(), compute, c.update.options, c.update.step, c.update.is_first);
  SweepRange range{};
  range.parameter = guarded[0].data();
  range.parameter_format = c.storage.parameter;
  range.master = c.storage.master;
  range.master_data = guarded[1].data();
  range.gradient = guarded[2].data();
  range.gradient_format = c.storage.gradient;
  range.direction = guarded[3].data();
  for (std::size_t s = 0; s < before.states.size(); ++s) {
    range.states[s] = guarded[4 + s].data();
    range.state_formats[s] = before.states[s].format;
    range.exponents[s] = guarded[4 + s].exponents();
  }
  range.first_element = c.update.first_element;
  range.num_elements = static_cast<std::int64_t>(count);
  range.gradient_multiplier = c.update.multiplier;
  range.scale = c.update.scale;
  range.scalars = &scalars;
  range.random_key = c.update.random_key;
  const auto num_blocks = static_cast<std::size_t>(num_norm_blocks(range.num_elements));
  const std::vector<BlockChange> poison(num_blocks, {-1.0, -1.0});
  GuardedArray<BlockChange> sums(poison.data(), num_blocks, 0);
  range.changes = changes == nullptr ? nullptr : sums.data();
  kernel_of(c.kernels, c.storage, c.update, c.phase)(range);
  if (changes != nullptr) changes->assign(sums.data(), sums.data() + num_blocks);
  for (const GuardedStored& array : guarded) EXPECT_TRUE(array.guards_are_intact());
  EXPECT_TRUE(sums.guards_are_intact());
  UpdateArrays after{
      guarded[0].array(), guarded[1].array(), guarded[2].array(), {}, guarded[3].array()};
  for (std::size_t s = 0; s < before.states.size(); ++s) {
    after.states.push_back(guarded[4 + s].array());
  }
  return after;
}

inline void expect_same_arrays(const UpdateArrays& expected, const UpdateArrays& got,
                               const RuleInfo& rule) {
  if (expected == got) return;
  expect_same_array(expected.parameter, got.parameter, "parameter");
  expect_same_array(expected.gradient, got.gradient, "gradient");
  expect_same_array(expected.direction, got.direction, "direction");
  if (expected.master.format == Format::kFloat32) {
    expect_same_array(expected.master, got.master, "master");
  } else {
    ASSERT_EQ(expected.master.bytes, got.master.bytes) << "low halves";
  }
  ASSERT_EQ(expected.states.size(), got.states.size());
  for (std::size_t s = 0; s < expected.states.size(); ++s) {
    expect_same_array(expected.states[s], got.states[s], rule.state_names[s]);
  }
}

// With sums and without.
inline void check_kernel(const KernelCase& c, const UpdateArrays& before,
                         const Expected& expected) {
  expect_same_arrays(expected.arrays, run_kernel(c, before, nullptr), c.update.rule());
  std::vector<BlockChange> changes;
  expect_same_arrays(expected.arrays, run_kernel(c, before, &changes), c.update.rule());
  ASSERT_EQ(changes.size(), expected.change_squares.size());
  for (std::size_t b = 0; b < changes.size(); ++b) {
    ASSERT_TRUE(
        same_value<Float64Format>(changes[b].parameter_squares, expected.parameter_squares[b]));
    ASSERT_TRUE(same_value<Float64Format>(changes[b].change_squares, expected.change_squares[b]))
        << "block " << b << ": " << changes[b].change_squares << ", expected "
        << expected.change_squares[b];
  }
}

}  // namespace tradewind
