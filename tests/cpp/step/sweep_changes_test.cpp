// How far a sweep moved each slot: sums of squares before the update and of the change.
#include <gtest/gtest.h>

#include <string>

#include "base/threaded_parallel.h"
#include "step/sweep_case.h"

namespace tradewind {
namespace {

void expect_same_changes(std::span<const SlotChange> got, std::span<const SlotChange> expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(same_value<Float64Format>(got[i].parameter_squares, expected[i].parameter_squares));
    ASSERT_TRUE(same_value<Float64Format>(got[i].change_squares, expected[i].change_squares)) << i;
  }
}

long double sum_of_squares(const std::vector<double>& values) {
  long double sum = 0.0L;
  for (const long double value : values) sum += value * value;
  return sum;
}

TEST(SweepChanges, AreCloseToALongDoubleSum) {
  SlotTable before = SlotTable::mixed();
  Sweep sweep;
  swept(before, 0.37, kernels(), kSerial, true, &sweep);
  ASSERT_EQ(sweep.changes().size(), before.entries().size());
  for (std::size_t i = 0; i < before.entries().size(); ++i) {
    const SlotTable::Entry& entry = before.entries()[i];
    const Expected expected = expected_entry(entry, 0.37);
    const double squares[] = {static_cast<double>(sum_of_squares(expected.before)),
                              static_cast<double>(sum_of_squares(expected.change))};
    // All terms are positive. In the arithmetic's precision each passes one rounding of its square,
    // 128 additions in its lane and 5 halvings; blocks add in float64. A square below the smallest
    // normal number may be lost: 40,000 of them stay under the second term.
    const double unit = entry.storage.is_double() ? 0x1p-53 : 0x1p-24;
    const double lost = entry.storage.is_double() ? 0x1p-1000 : 0x1p-110;
    EXPECT_NEAR(sweep.changes()[i].parameter_squares, squares[0], 140 * unit * squares[0] + lost)
        << i;
    if (std::isnan(squares[1])) {
      EXPECT_TRUE(std::isnan(sweep.changes()[i].change_squares)) << i;
    } else {
      EXPECT_NEAR(sweep.changes()[i].change_squares, squares[1], 140 * unit * squares[1] + lost)
          << i;
    }
    if (entry.num_elements() >= 4096) {
      EXPECT_GT(squares[0], 0.0);
      EXPECT_FALSE(squares[1] == 0.0);
    }
  }
}

TEST(SweepChanges, CombineBlocksInLanes) {
  SlotTable before = SlotTable::mixed();
  before.add(DType::kFloat32, find_rule("lamb"), 200'000);  // 49 blocks, more than lanes
  before.add(DType::kBFloat16, find_rule("adam"), 200'000);
  std::vector<SlotChange> expected;
  for (const SlotTable::Entry& entry : before.entries()) {
    const Expected update = expected_entry(entry, 0.37);
    expected.push_back(
        {reference_lane_sum(update.parameter_squares), reference_lane_sum(update.change_squares)});
  }
  for (const std::string_view isa : supported_isas()) {
    for (const Parallel& parallel : {kSerial, kThreads<1>, kThreads<2>, kThreads<7>}) {
      Sweep sweep;
      swept(before, 0.37, kernels_for(isa), parallel, true, &sweep);
      expect_same_changes(sweep.changes(), expected);
      if (HasFatalFailure()) FAIL() << isa;
    }
  }
}

TEST(SweepChanges, TakingThemChangesNoUpdate) {
  const SlotTable before = SlotTable::mixed();
  Sweep sweep;
  EXPECT_TRUE(swept(before, 0.37, kernels(), kThreads<2>, true, &sweep) ==
              swept(before, 0.37, kernels(), kThreads<2>));
}

TEST(SweepChanges, AreThoseOfTheLastRun) {
  SlotTable large = SlotTable::mixed();
  SlotTable small;
  small.add(DType::kFloat32, find_rule("muon"), 5000);
  small.add(DType::kFloat32, find_rule("lamb"), 0);
  Sweep expected;
  swept(small, 0.37, kernels(), kSerial, true, &expected);
  Sweep reused;
  swept(large, 1.0, kernels(), kSerial, true, &reused);
  swept(small, 0.37, kernels(), kSerial, true, &reused);
  expect_same_changes(reused.changes(), expected.changes());
}

TEST(SweepChanges, OfANormRuleAreOfTheScaledChange) {
  SlotTable table;
  table.add(DType::kFloat64, find_rule("lamb"), 1);
  SlotTable::Entry& entry = table.entries()[0];
  entry.arrays.parameter = encode_array<double>(Format::kFloat64, {3.0});
  entry.arrays.gradient = encode_array<double>(Format::kFloat64, {1.0});
  for (StoredArray& state : entry.arrays.states) state = encode_array<double>(state.format, {0.0});
  entry.update.options = {0.5, 0.0, 0.0, 0.0, 0.0};  // the direction is the gradient's sign
  Sweep sweep;
  const SlotTable after = swept(table, 1.0, kernels(), kSerial, true, &sweep);
  EXPECT_EQ(sweep.changes()[0].parameter_squares, 9.0);
  EXPECT_EQ(sweep.changes()[0].change_squares, 0.25 * 9.0);  // lr * 3 / 1
}

}  // namespace
}  // namespace tradewind
