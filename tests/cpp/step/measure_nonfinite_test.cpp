// NaN and infinite gradients: counted, found, and forgotten by the next step.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/threaded_parallel.h"
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

TEST(Nonfinite, ElementsAreCountedAndTheFirstSlotNamed) {
  SlotTable table = SlotTable::mixed();
  const std::vector<SweepSlot> slots = table.slots();
  std::vector<std::size_t> float32_slots;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].gradient_dtype == DType::kFloat32 && slots[i].num_elements >= 5000) {
      float32_slots.push_back(i);
    }
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
      EXPECT_TRUE(std::isnan(measure.norm()));
      EXPECT_TRUE(std::isfinite(measure.slots()[float32_slots[0]].max_abs));
      EXPECT_TRUE(std::isnan(measure.slots()[float32_slots[1]].max_abs));
      EXPECT_EQ(measure.slots()[float32_slots[2]].max_abs, kInfinity);
    }
  }
}

TEST(Nonfinite, AFiniteRunForgetsTheOneBefore) {
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

TEST(Nonfinite, AdoptedBlocksAreLookedThroughToo) {
  SlotTable table;
  table.add(DType::kFloat32, 0, 5000);
  const std::vector<SweepSlot> slots = table.slots();
  table.gradient<float>(0)[4100] = -INFINITY;
  BlockMeasure blocks[2];
  kernels().measure[0](slots[0].gradient, 5000, blocks);
  Measure measure;
  measure.begin(slots);
  measure.adopt(0, blocks);
  measure.run(kernels(), kSerial);
  EXPECT_EQ(measure.num_nonfinite(), 1);
  EXPECT_EQ(measure.first_nonfinite_slot(), 0);
}

TEST(Nonfinite, ElementsOfEveryDTypeAreCounted) {
  for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
    visit_format(static_cast<DType>(dtype), [&]<class Type>() {
      SlotTable table;
      table.add(Type::kDType, 0, 0);
      table.add(Type::kDType, 0, 9000);
      const std::vector<SweepSlot> slots = table.slots();
      auto* const gradient = table.gradient<typename Type::Stored>(1);
      for (const int place : {0, 31, 4095, 4096, 8999}) gradient[place] = Type::encode(kInfinity);
      gradient[100] = Type::encode(NAN);
      const Measure measure = measured(slots, kernels(), kSerial);
      EXPECT_EQ(measure.num_nonfinite(), 6);
      EXPECT_EQ(measure.first_nonfinite_slot(), 1);
    });
  }
}

TEST(Nonfinite, FiniteElementsAreNeverCounted) {
  SlotTable table;
  table.add(DType::kFloat32, 0, 10000);
  table.add(DType::kFloat64, 0, 10);
  const std::vector<SweepSlot> slots = table.slots();
  std::fill_n(table.gradient<float>(0), 10000, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(measured(slots, kernels(), kSerial).sum_of_squares()));
  table.gradient<double>(1)[7] = 1e200;  // its square overflows, it does not
  const Measure measure = measured(slots, kernels(), kSerial);
  EXPECT_EQ(measure.sum_of_squares(), kInfinity);
  EXPECT_EQ(measure.slots()[1].max_abs, 1e200);
  EXPECT_EQ(measure.num_nonfinite(), 0);
  EXPECT_EQ(measure.first_nonfinite_slot(), -1);
}

// NaN stays the largest whatever follows, and the blocks behind it count as well.
TEST(Nonfinite, ANaNBlockHidesNoOther) {
  for (const int place : {0, 4096, 9999}) {
    for (const float other : {1.0F, INFINITY}) {
      SlotTable table;
      table.add(DType::kFloat32, 0, 10000);
      std::fill_n(table.gradient<float>(0), 10000, 0.0F);
      for (const int first : {10, 4200, 9000}) table.gradient<float>(0)[first] = other;
      table.gradient<float>(0)[place] = NAN;
      const Measure measure = measured(table.slots(), kernels(), kSerial);
      EXPECT_TRUE(std::isnan(measure.slots()[0].max_abs)) << place;
      EXPECT_EQ(measure.slots()[0].num_zeros, 9996) << place;
      EXPECT_EQ(measure.num_nonfinite(), std::isfinite(other) ? 1 : 4);
    }
  }
}

}  // namespace
}  // namespace tradewind
