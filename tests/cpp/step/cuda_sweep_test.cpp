// The CUDA kernels, over the emulated grid, against the CPU's: every byte.
#include <gtest/gtest.h>

#include "arena/layout.h"
#include "step/cuda_tables.h"

namespace tradewind {
namespace {

static_assert(TRADEWIND_CUDA_BLOCK_ELEMENTS == kNormBlockElements);
static_assert(TRADEWIND_CUDA_MAX_STATES == kMaxStates);
static_assert(TRADEWIND_CUDA_MAX_OPTIONS == kMaxOptions);
static_assert(TRADEWIND_CUDA_SCALAR_BYTES == sizeof(ScalarBlock));

class CudaSweep : public CudaTest, public testing::WithParamInterface<int> {};

void expect_same_changes(const CudaTable& device, const CpuStep& cpu) {
  ASSERT_EQ(const_cast<CudaTable&>(device).slot_changes().size(), cpu.sweep.changes().size());
  for (std::size_t i = 0; i < cpu.sweep.changes().size(); ++i) {
    const TradewindCudaChange& got = const_cast<CudaTable&>(device).slot_changes()[i];
    EXPECT_EQ(got.parameter_squares, cpu.sweep.changes()[i].parameter_squares) << "slot " << i;
    EXPECT_EQ(got.change_squares, cpu.sweep.changes()[i].change_squares) << "slot " << i;
  }
}

TEST_P(CudaSweep, EveryStorageHasTheCpusBits) {
  for (const std::size_t shift : {0, 1}) {
    for (const bool wants_changes : {false, true}) {
      CudaTable cpu_table;
      add_storages(cpu_table, GetParam(), shift);
      CudaTable device_table = cpu_table;
      StepOrders orders;
      orders.wants_changes = wants_changes;
      TradewindCudaSettings& settings = device_table.settings();
      settings.gradient_multiplier = 0.125;
      settings.max_norm = 3.5;
      settings.seed = 99;
      for (int step = 0; step < 2; ++step) {
        device_step(device_table, orders);
        const auto cpu = cpu_step(cpu_table, 0.125, 3.5, 99, orders);
        EXPECT_EQ(device_table.outcome().norm, cpu->norm);
        EXPECT_EQ(device_table.outcome().clip_factor, cpu->clip_factor);
        EXPECT_LT(cpu->clip_factor, 1.0);
        if (!wants_changes) continue;
        expect_same_changes(device_table, *cpu);
        for (const TradewindCudaChange& change : device_table.slot_changes()) {
          EXPECT_TRUE(std::isfinite(change.change_squares));
        }
      }
      expect_same_memory(cpu_table, device_table);
    }
  }
}

// Without eps, what a thread makes of elements beyond the end is NaN: it must go nowhere. (A change
// may be infinite, on the CPU as well.)
TEST_P(CudaSweep, NothingBeyondTheEndCounts) {
  CudaTable cpu_table;
  add_storages(cpu_table, GetParam(), 0, false);
  cpu_table.add_groups();
  const RuleInfo& rule = rules()[static_cast<std::size_t>(GetParam())];
  for (std::size_t i = 0; i < rule.option_names.size(); ++i) {
    const bool is_eps = std::string_view(rule.option_names[i]) == "eps";
    if (is_eps) cpu_table.groups()[static_cast<std::size_t>(GetParam())].options[i] = 0.0;
  }
  CudaTable table = cpu_table;
  table.settings().gradient_multiplier = 1.0;
  StepOrders orders;
  orders.wants_changes = true;
  device_step(table, orders);
  const auto cpu = cpu_step(cpu_table, 1.0, -1.0, 0, orders);
  expect_same_memory(cpu_table, table);
  expect_same_changes(table, *cpu);
}

TEST_P(CudaSweep, TheOrderOfThreadsChangesNothing) {
  CudaTable first;
  add_storages(first, GetParam(), 0);
  first.settings() = {};
  first.settings().gradient_multiplier = 1.0;
  StepOrders orders;
  orders.wants_changes = true;
  CudaTable second = first;
  cuda_emulation::set_order(1);
  device_step(first, orders);
  cuda_emulation::set_order(2);
  device_step(second, orders);
  expect_same_memory(first, second);
  EXPECT_EQ(first.outcome().sum_of_squares, second.outcome().sum_of_squares);
}

INSTANTIATE_TEST_SUITE_P(Rules, CudaSweep, testing::Range(0, num_rules()), [](const auto& info) {
  return std::string(rules()[static_cast<std::size_t>(info.param)].name);
});

class CudaSweeps : public CudaTest {};

CudaTable many_slots(int num_slots) {
  CudaTable table;
  for (int i = 0; i < num_slots; ++i) {
    CudaSlotSpec spec;
    spec.rule_idx = i % num_rules();
    spec.num_elements = i % 6 == 5 ? 0 : 1 + i % 41;
    spec.parameter = i % 3 == 0 ? Format::kBFloat16 : Format::kFloat32;
    if (i % 4 == 1) spec.parameter = Format::kFloat64;
    spec.gradient = spec.parameter;
    spec.master = i % 12 == 0 ? Master::kSplit : Master::kNone;
    spec.states = {Format::kBFloat16, Format::kFloat32, Format::kStochasticBFloat16};
    table.add(spec);
  }
  table.settings().gradient_multiplier = 1.0;
  table.settings().max_norm = 0.5;
  return table;
}

TEST_F(CudaSweeps, ThreeThousandSlotsOfAllRules) {
  CudaTable cpu_table = many_slots(3000);  // the last one is empty
  CudaTable table = cpu_table;
  device_step(table);
  const auto cpu = cpu_step(cpu_table, 1.0, 0.5, 0);
  EXPECT_EQ(table.outcome().norm, cpu->norm);
  expect_same_memory(cpu_table, table);
}

// The whole table for each rule does the same as a list of that rule's slots.
TEST_F(CudaSweeps, SlotsOfOtherRulesArePassedOver) {
  CudaTable table = many_slots(60);
  CudaTable unlisted = table;
  StepOrders orders;
  orders.uses_lists = false;
  device_step(table);
  device_step(unlisted, orders);
  expect_same_memory(table, unlisted);
}

TEST_F(CudaSweeps, ALargeSlotOfManyBlocks) {
  CudaTable cpu_table;
  CudaSlotSpec spec;
  spec.rule_idx = find_rule("lamb");
  spec.num_elements = 300 * kNormBlockElements + 77;
  spec.states = {Format::kSigned8, Format::kPositive8, Format::kFloat32};
  cpu_table.add(spec);
  CudaTable table = cpu_table;
  table.settings().gradient_multiplier = 1.0;
  StepOrders orders;
  orders.wants_changes = true;
  device_step(table, orders);
  const auto cpu = cpu_step(cpu_table, 1.0, -1.0, 0, orders);
  expect_same_memory(cpu_table, table);
  expect_same_changes(table, *cpu);
}

TEST_F(CudaSweeps, WrongCallsAreRefused) {
  CudaTable table = many_slots(5);
  table.bind();
  const auto sweep = [&](int rule_idx, int phase) {
    return tradewind_cuda_sweep(&table.c(), nullptr, rule_idx, 0, phase, 0, nullptr);
  };
  EXPECT_NE(sweep(-1, TRADEWIND_CUDA_UPDATE), 0);
  EXPECT_NE(sweep(num_rules(), TRADEWIND_CUDA_UPDATE), 0);
  EXPECT_NE(sweep(find_rule("adamw"), TRADEWIND_CUDA_FINISH), 0);
  EXPECT_EQ(cuda_emulation::counts().launches, 0);
}

TEST_F(CudaSweeps, AnEmptyTableIsStepped) {
  CudaTable table;
  table.settings().gradient_multiplier = 1.0;
  device_step(table);
  EXPECT_EQ(table.outcome().norm, 0.0);
  EXPECT_EQ(table.control().state.num_steps, 1);
}

}  // namespace
}  // namespace tradewind
