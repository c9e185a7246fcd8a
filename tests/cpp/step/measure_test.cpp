// The measure over a table of slots: norm, non-finite elements, and what was measured while hot.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "arena/layout.h"
#include "base/threaded_parallel.h"
#include "step/slot_table.h"
#include "step/sweep.h"

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

std::vector<double> block_sums(const SweepSlot& slot) {
  std::vector<double> sums(static_cast<std::size_t>(num_norm_blocks(slot.num_elements)));
  kernels().measure[static_cast<int>(slot.dtype)](slot.gradient, slot.num_elements, sums.data());
  return sums;
}

void expect_same(const Measure& got, const Measure& expected) {
  EXPECT_EQ(got.sum_of_squares(), expected.sum_of_squares());
  EXPECT_EQ(got.num_nonfinite(), expected.num_nonfinite());
  EXPECT_EQ(got.first_nonfinite_slot(), expected.first_nonfinite_slot());
  EXPECT_EQ(std::vector<double>(got.slot_sums().begin(), got.slot_sums().end()),
            std::vector<double>(expected.slot_sums().begin(), expected.slot_sums().end()));
}

TEST(Measure, SumsBlocksThenParametersInOrder) {
  SlotTable table = SlotTable::mixed();
  const std::vector<SweepSlot> slots = table.slots();
  const Measure measure = measured(slots, kernels(), kSerial);
  double total = 0.0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    double slot_sum = 0.0;
    for (const double block_sum : block_sums(slots[i])) slot_sum += block_sum;
    EXPECT_EQ(measure.slot_sums()[i], slot_sum) << i;
    total += slot_sum;
  }
  EXPECT_EQ(measure.sum_of_squares(), total);
  EXPECT_EQ(measure.norm(), std::sqrt(total));
  EXPECT_EQ(measure.num_nonfinite(), 0);
  EXPECT_EQ(measure.first_nonfinite_slot(), -1);
}

TEST(Measure, GivesTheSameBitsOnEveryIsaAndThreadCount) {
  SlotTable table = SlotTable::mixed();
  const std::vector<SweepSlot> slots = table.slots();
  const Measure expected = measured(slots, kernels_for("baseline"), kSerial);
  EXPECT_GT(expected.sum_of_squares(), 0.0);
  for (const std::string_view isa : supported_isas()) {
    for (const Parallel& parallel : {kSerial, kThreads<1>, kThreads<2>, kThreads<7>}) {
      expect_same(measured(slots, kernels_for(isa), parallel), expected);
    }
  }
}

TEST(Measure, AdoptedSumsGiveTheSameBitsAsComputedOnes) {
  SlotTable table = SlotTable::mixed();
  const std::vector<SweepSlot> slots = table.slots();
  const Measure expected = measured(slots, kernels(), kSerial);
  for (const std::size_t every : {1U, 2U, 3U}) {
    Measure measure;
    measure.begin(slots);
    for (std::size_t i = 0; i < slots.size(); i += every) {
      measure.adopt(static_cast<std::int64_t>(i), block_sums(slots[i]));
    }
    measure.run(kernels(), kThreads<2>);
    expect_same(measure, expected);
  }
}

TEST(Measure, AdoptedSumsAreTakenAndForgottenByTheNextBegin) {
  SlotTable table;
  table.add(DType::kFloat32, 0, 1);
  table.add(DType::kFloat32, 0, 1);
  const std::vector<SweepSlot> slots = table.slots();
  *table.gradient<float>(0) = 2.0F;
  *table.gradient<float>(1) = 3.0F;
  Measure measure;
  measure.begin(slots);
  measure.adopt(0, std::vector<double>{100.0});
  measure.run(kernels(), kSerial);
  EXPECT_EQ(measure.sum_of_squares(), 109.0);
  measure.begin(slots);
  measure.run(kernels(), kSerial);
  EXPECT_EQ(measure.sum_of_squares(), 13.0);
}

TEST(Measure, CountsNonfiniteElementsAndNamesTheFirstSlot) {
  SlotTable table = SlotTable::mixed();
  std::vector<SweepSlot> slots = table.slots();
  std::vector<std::size_t> float32_slots;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].dtype == DType::kFloat32 && slots[i].num_elements >= 5000)
      float32_slots.push_back(i);
  }
  ASSERT_GE(float32_slots.size(), 3U);
  table.gradient<float>(float32_slots[1])[4999] = NAN;
  table.gradient<float>(float32_slots[2])[0] = -INFINITY;
  table.gradient<float>(float32_slots[2])[3] = INFINITY;
  for (const std::string_view isa : supported_isas()) {
    for (const Parallel& parallel : {kSerial, kThreads<7>}) {
      const Measure measure = measured(slots, kernels_for(isa), parallel);
      EXPECT_EQ(measure.num_nonfinite(), 3);
      EXPECT_EQ(measure.first_nonfinite_slot(), static_cast<std::int64_t>(float32_slots[1]));
      EXPECT_TRUE(std::isnan(measure.sum_of_squares()));
    }
  }
}

TEST(Measure, AFiniteRunForgetsTheNonfiniteOneBefore) {
  SlotTable table;
  table.add(DType::kFloat32, 0, 3);
  const std::vector<SweepSlot> slots = table.slots();
  Measure measure;
  for (const bool is_finite : {false, true, false}) {
    table.gradient<float>(0)[1] = is_finite ? 1.0F : INFINITY;
    measure.begin(slots);
    measure.run(kernels(), kSerial);
    EXPECT_EQ(measure.num_nonfinite(), is_finite ? 0 : 1);
    EXPECT_EQ(measure.first_nonfinite_slot(), is_finite ? -1 : 0);
  }
}

TEST(Measure, CountsNonfiniteElementsOfEveryDType) {
  for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
    visit_format(static_cast<DType>(dtype), [&]<class Format>() {
      SlotTable table;
      table.add(Format::kDType, 0, 0);
      table.add(Format::kDType, 0, 9000);
      const std::vector<SweepSlot> slots = table.slots();
      auto* const gradient = table.gradient<typename Format::Stored>(1);
      for (const int place : {0, 31, 4095, 4096, 8999}) gradient[place] = Format::encode(kInfinity);
      gradient[100] = Format::encode(NAN);
      const Measure measure = measured(slots, kernels(), kSerial);
      EXPECT_EQ(measure.num_nonfinite(), 6);
      EXPECT_EQ(measure.first_nonfinite_slot(), 1);
    });
  }
}

TEST(Measure, FiniteValuesAreNeverCounted) {
  SlotTable table;
  table.add(DType::kFloat32, 0, 10000);
  table.add(DType::kFloat64, 0, 10);
  const std::vector<SweepSlot> slots = table.slots();
  std::fill_n(table.gradient<float>(0), 10000, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(measured(slots, kernels(), kSerial).sum_of_squares()));
  table.gradient<double>(1)[7] = 1e200;  // its square overflows, it does not
  const Measure measure = measured(slots, kernels(), kSerial);
  EXPECT_EQ(measure.sum_of_squares(), kInfinity);
  EXPECT_EQ(measure.num_nonfinite(), 0);
  EXPECT_EQ(measure.first_nonfinite_slot(), -1);
}

TEST(Measure, OfNothingIsZero) {
  const Measure measure = measured({}, kernels(), kThreads<2>);
  EXPECT_EQ(measure.sum_of_squares(), 0.0);
  EXPECT_TRUE(measure.slot_sums().empty());
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
