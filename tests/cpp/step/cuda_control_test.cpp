// What the device decides: norm, veto, clip factor, steps and learning rates.
#include <gtest/gtest.h>

#include <limits>

#include "step/cuda_tables.h"

namespace tradewind {
namespace {

class CudaControl : public CudaTest {};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void spoil(CudaTable& table, float value) { table.entries()[2].gradient.as<float>()[4500] = value; }

void expect_vetoed(const CudaTable& before, const CudaTable& after) {
  expect_same_memory(before, after);
  EXPECT_EQ(after.outcome().vetoed, 1);
}

TEST_F(CudaControl, AVetoLeavesEveryByte) {
  for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    CudaTable table = small_table();
    spoil(table, value);
    const CudaTable before = table;
    StepOrders orders;
    orders.wants_changes = true;
    device_step(table, orders);
    expect_vetoed(before, table);
    EXPECT_EQ(table.outcome().first_nonfinite_slot, 2);
    EXPECT_FALSE(std::isfinite(table.outcome().norm));
    EXPECT_EQ(table.control().state.num_skipped, 1);
    EXPECT_EQ(table.control().state.num_steps, 0);
    table.block_changes()[0].change_squares = 5.0;
    ASSERT_EQ(tradewind_cuda_combine_changes(&table.c(), nullptr, nullptr), 0);
    for (const TradewindCudaChange& change : table.slot_changes()) {
      EXPECT_EQ(change.change_squares, 0.0);
    }
  }
}

TEST_F(CudaControl, ANonFiniteNormWithoutAVetoDoesWhatTheCpuDoes) {
  CudaTable table = small_table();
  table.settings().vetoes_nonfinite = 0;
  table.settings().max_norm = 1.0;
  spoil(table, kInfinity);
  device_step(table);
  EXPECT_EQ(table.outcome().vetoed, 0);
  EXPECT_EQ(table.outcome().norm, kInfinity);
  EXPECT_EQ(table.outcome().clip_factor, 0.0);
  EXPECT_TRUE(std::isnan(table.entries()[2].parameter.as<float>()[4500]));
}

TEST_F(CudaControl, AnExternalVetoCounts) {
  const float found = 1.0F;
  const float not_found = 0.0F;
  CudaTable table = small_table();
  const CudaTable before = table;
  table.settings().vetoes_nonfinite = 0;
  table.settings().found_inf = &found;
  device_step(table);
  expect_vetoed(before, table);
  table.settings().found_inf = &not_found;
  device_step(table);
  EXPECT_EQ(table.outcome().vetoed, 0);
  EXPECT_EQ(table.control().state.num_skipped, 1);
  EXPECT_EQ(table.control().state.num_steps, 1);
}

TEST_F(CudaControl, UnscalesAndClipsInOneFactor) {
  const float grad_scale = 1024.0F;
  for (const double max_norm : {-1.0, 0.0, 0.25, 1e6}) {
    CudaTable cpu_table = small_table();
    CudaTable table = cpu_table;
    table.settings().gradient_multiplier = 0.5;
    table.settings().grad_scale = &grad_scale;
    table.settings().max_norm = max_norm;
    device_step(table);
    const double unscale = 0.5 / 1024.0;
    const auto cpu = cpu_step(cpu_table, unscale, max_norm, 0);
    EXPECT_EQ(table.outcome().norm, cpu->norm);
    EXPECT_EQ(table.outcome().clip_factor, cpu->clip_factor);
    EXPECT_EQ(table.outcome().clip_factor < 1.0, max_norm == 0.25 || max_norm == 0.0);
    EXPECT_EQ(table.outcome().gradient_multiplier, unscale * cpu->clip_factor);
    EXPECT_EQ(table.outcome().loss_scale, 1024.0F);
    expect_same_memory(cpu_table, table);
  }
}

TEST_F(CudaControl, WithoutAMeasureNothingIsClippedOrVetoed) {
  CudaTable cpu_table = small_table();
  CudaTable table = cpu_table;
  table.settings().max_norm = 1e-9;
  table.control().outcome.num_nonfinite_slots = 3.0;  // of an earlier step
  StepOrders orders;
  orders.measures = false;
  device_step(table, orders);
  cpu_step(cpu_table, 1.0, -1.0, 0, orders);
  EXPECT_EQ(table.outcome().norm, 0.0);
  EXPECT_EQ(table.outcome().clip_factor, 1.0);
  EXPECT_EQ(table.outcome().vetoed, 0);
  expect_same_memory(cpu_table, table);
}

TEST_F(CudaControl, AdvancesStepsAndStartsOnce) {
  CudaTable table = small_table();
  device_step(table);
  device_step(table);
  EXPECT_EQ(*table.entries()[0].step.as<float>(), 2.0F);  // fresh
  EXPECT_EQ(*table.entries()[1].step.as<float>(), 4.0F);
  EXPECT_EQ(*table.entries()[0].has_stepped.as<std::uint8_t>(), 1);
  EXPECT_EQ(table.control().state.num_steps, 2);
}

TEST_F(CudaControl, TheLearningRateMayBeATensor) {
  const float narrow = 0.0078125F;
  const double wide = 0.0123456789;
  for (const bool is_double : {false, true}) {
    CudaTable table = small_table();
    table.add_groups();
    CudaTable expected = table;
    const auto rule_idx = static_cast<std::size_t>(find_rule("adamw"));
    expected.groups()[rule_idx].options[0] = is_double ? wide : narrow;
    table.groups()[rule_idx].lr = is_double ? static_cast<const void*>(&wide) : &narrow;
    table.groups()[rule_idx].lr_is_double = is_double ? 1 : 0;
    device_step(table);
    device_step(expected);
    expect_same_memory(expected, table);
  }
}

TEST_F(CudaControl, TheSeedDecidesRandomRounding) {
  CudaTable table = small_table();
  CudaTable other = table;
  other.settings().seed = 1;
  device_step(table);
  device_step(other);
  // adamw's states, of 5,000 elements.
  EXPECT_NE(table.entries()[2].states[0].first_difference(other.entries()[2].states[0]),
            GuardedBytes::kSame);
  EXPECT_NE(table.entries()[2].states[1].first_difference(other.entries()[2].states[1]),
            GuardedBytes::kSame);
  EXPECT_EQ(table.entries()[2].parameter.first_difference(other.entries()[2].parameter),
            GuardedBytes::kSame);
}

}  // namespace
}  // namespace tradewind
