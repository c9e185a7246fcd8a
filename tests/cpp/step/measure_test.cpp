// The measure over a table of slots: how blocks and slots combine, and what was measured while hot.
#include <gtest/gtest.h>

#include <cmath>

#include "base/threaded_parallel.h"
#include "step/measure_reference.h"
#include "step/slot_table.h"

namespace tradewind {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Measure measured(std::span<const SweepSlot> slots, const Kernels& kernels,
                 const Parallel& parallel) {
  Measure measure;
  measure.begin(slots);
  measure.run(kernels, parallel);
  return measure;
}

std::vector<BlockMeasure> blocks_of(const SweepSlot& slot) {
  std::vector<BlockMeasure> blocks(static_cast<std::size_t>(num_norm_blocks(slot.num_elements)));
  kernels().measure[static_cast<int>(slot.gradient_dtype)](slot.gradient, slot.num_elements,
                                                           blocks.data());
  return blocks;
}

void expect_same(const Measure& got, const Measure& expected) {
  EXPECT_EQ(got.sum_of_squares(), expected.sum_of_squares());
  EXPECT_EQ(got.num_nonfinite(), expected.num_nonfinite());
  EXPECT_EQ(got.first_nonfinite_slot(), expected.first_nonfinite_slot());
  ASSERT_EQ(got.slots().size(), expected.slots().size());
  for (std::size_t i = 0; i < got.slots().size(); ++i) {
    EXPECT_EQ(got.slots()[i].sum_of_squares, expected.slots()[i].sum_of_squares) << i;
    EXPECT_EQ(got.slots()[i].max_abs, expected.slots()[i].max_abs) << i;
    EXPECT_EQ(got.slots()[i].num_zeros, expected.slots()[i].num_zeros) << i;
  }
}

// 200,000 elements are 49 blocks and 117 slots, more than lanes.
SlotTable many_slots() {
  SlotTable table = SlotTable::mixed();
  table.add(DType::kFloat32, 0, 200'000);
  table.add(DType::kBFloat16, 0, 0);
  return table;
}

TEST(Measure, CombinesBlocksThenParametersInLanes) {
  SlotTable table = many_slots();
  const std::vector<SweepSlot> slots = table.slots();
  const Measure measure = measured(slots, kernels(), kSerial);
  ASSERT_EQ(measure.slots().size(), slots.size());
  std::vector<double> slot_sums;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    std::vector<double> sums;
    double max_abs = 0.0;
    std::int64_t num_zeros = 0;
    for (const BlockMeasure& block : blocks_of(slots[i])) {
      sums.push_back(block.sum_of_squares);
      max_abs = std::fmax(max_abs, block.max_abs);
      num_zeros += block.num_zeros;
    }
    slot_sums.push_back(reference_lane_sum(sums));
    EXPECT_EQ(measure.slots()[i].sum_of_squares, slot_sums[i]) << i;
    EXPECT_EQ(measure.slots()[i].max_abs, max_abs) << i;
    EXPECT_EQ(measure.slots()[i].num_zeros, num_zeros) << i;
  }
  EXPECT_EQ(measure.sum_of_squares(), reference_lane_sum(slot_sums));
  EXPECT_EQ(measure.norm(), std::sqrt(reference_lane_sum(slot_sums)));
  EXPECT_EQ(measure.num_nonfinite(), 0);
  EXPECT_EQ(measure.first_nonfinite_slot(), -1);
}

TEST(Measure, GivesTheSameBitsOnEveryIsaAndThreadCount) {
  SlotTable table = many_slots();
  const std::vector<SweepSlot> slots = table.slots();
  const Measure expected = measured(slots, kernels_for("baseline"), kSerial);
  EXPECT_GT(expected.sum_of_squares(), 0.0);
  for (const std::string_view isa : supported_isas()) {
    for (const Parallel& parallel : {kSerial, kThreads<1>, kThreads<2>, kThreads<7>}) {
      expect_same(measured(slots, kernels_for(isa), parallel), expected);
    }
  }
}

TEST(Measure, AdoptedBlocksGiveTheSameBitsAsComputedOnes) {
  SlotTable table = many_slots();
  const std::vector<SweepSlot> slots = table.slots();
  const Measure expected = measured(slots, kernels(), kSerial);
  for (const std::size_t every : {1U, 2U, 3U}) {
    for (const std::string_view isa : supported_isas()) {
      Measure measure;
      measure.begin(slots);
      for (std::size_t i = 0; i < slots.size(); i += every) {
        measure.adopt(static_cast<std::int64_t>(i), blocks_of(slots[i]));
      }
      measure.run(kernels_for(isa), kThreads<2>);
      expect_same(measure, expected);
    }
  }
}

TEST(Measure, AdoptedBlocksAreTakenAndForgottenByTheNextBegin) {
  SlotTable table;
  table.add(DType::kFloat32, 0, 1);
  table.add(DType::kFloat32, 0, 1);
  const std::vector<SweepSlot> slots = table.slots();
  *table.gradient<float>(0) = 2.0F;
  *table.gradient<float>(1) = 3.0F;
  Measure measure;
  measure.begin(slots);
  measure.adopt(0, std::vector<BlockMeasure>{{100.0, 10.0, 7}});
  measure.run(kernels(), kSerial);
  EXPECT_EQ(measure.sum_of_squares(), 109.0);
  EXPECT_EQ(measure.slots()[0].max_abs, 10.0);
  EXPECT_EQ(measure.slots()[0].num_zeros, 7);
  measure.begin(slots);
  measure.run(kernels(), kSerial);
  EXPECT_EQ(measure.sum_of_squares(), 13.0);
  EXPECT_EQ(measure.slots()[0].max_abs, 2.0);
  EXPECT_EQ(measure.slots()[0].num_zeros, 0);
}

TEST(Measure, AFewSlotsAfterManyAreMeasuredAlone) {
  SlotTable many = many_slots();
  SlotTable few;
  few.add(DType::kFloat64, 0, 5000);
  few.add(DType::kFloat16, 0, 0);
  const std::vector<SweepSlot> slots[] = {many.slots(), few.slots()};
  Measure measure;
  for (const std::size_t which : {0, 1, 0}) {
    measure.begin(slots[which]);
    measure.run(kernels(), kThreads<2>);
    expect_same(measure, measured(slots[which], kernels(), kSerial));
  }
}

TEST(Measure, OfNothingIsZero) {
  const Measure measure = measured({}, kernels(), kThreads<2>);
  EXPECT_EQ(measure.sum_of_squares(), 0.0);
  EXPECT_EQ(measure.norm(), 0.0);
  EXPECT_TRUE(measure.slots().empty());
  EXPECT_EQ(measure.first_nonfinite_slot(), -1);
}

TEST(ClipFactor, IsTorchs) {
  EXPECT_EQ(clip_factor(0.0, 1.0), 1.0);
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(2.0, 1.0), 1.0 / (2.0 + 1e-6));
  EXPECT_LT(clip_factor(1.0, 1.0), 1.0);  // 1 / (1 + 1e-6)
  EXPECT_EQ(clip_factor(3.0, 0.0), 0.0);
  EXPECT_EQ(clip_factor(kInfinity, 1.0), 0.0);
  EXPECT_TRUE(std::isnan(clip_factor(NAN, 1.0)));
}

}  // namespace
}  // namespace tradewind
