// One step of a table by the emulated library, as a caller of its C interface makes it, and the
// same by the CPU's measure and sweep with the decisions written out here.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cuda_emulation/grid.h"
#include "step/cuda_table.h"
#include "step/sweep.h"

namespace tradewind {

struct StepOrders {
  bool measures = true;
  bool wants_changes = false;
  bool uses_lists = true;  // one for each rule, instead of the whole table for each
};

// In place of Newton-Schulz iterations: exact, and needs the whole matrix.
inline void transform_direction(bool is_double, std::int64_t count, void* direction) {
  const auto reverse = [&](auto* values) {
    std::reverse(values, values + count);
    for (std::int64_t i = 0; i < count; ++i) values[i] *= 0.5F;
  };
  is_double ? reverse(static_cast<double*>(direction)) : reverse(static_cast<float*>(direction));
}

inline void sweep_rule(CudaTable& table, int rule_idx, bool is_double, const StepOrders& orders) {
  std::vector<std::int32_t> members;
  for (std::size_t i = 0; i < table.entries().size(); ++i) {
    const CudaSlotSpec& spec = table.entries()[i].spec;
    if (spec.rule_idx == rule_idx && spec.is_double() == is_double) {
      members.push_back(static_cast<std::int32_t>(i));
    }
  }
  if (members.empty()) return;
  const CudaList list(table, members);
  const TradewindCudaList* visited = orders.uses_lists ? list.c() : nullptr;
  const auto sweep = [&](int phase, bool wants_changes) {
    ASSERT_EQ(tradewind_cuda_sweep(&table.c(), visited, rule_idx, is_double ? 1 : 0, phase,
                                   wants_changes ? 1 : 0, nullptr),
              0)
        << cuda_emulation::failure();
  };
  const auto combine_changes = [&] {
    ASSERT_EQ(tradewind_cuda_combine_changes(&table.c(), list.c(), nullptr), 0)
        << cuda_emulation::failure();
  };
  const Needs needs = rules()[static_cast<std::size_t>(rule_idx)].needs;
  sweep(TRADEWIND_CUDA_UPDATE, orders.wants_changes || needs == Needs::kNorms);
  if (needs == Needs::kNorms) combine_changes();
  if (needs == Needs::kMatrix && table.outcome().vetoed == 0) {
    for (const std::int32_t idx : members) {
      CudaEntry& entry = table.entries()[static_cast<std::size_t>(idx)];
      transform_direction(is_double, entry.spec.num_elements, entry.direction.data());
    }
  }
  if (needs != Needs::kElement) sweep(TRADEWIND_CUDA_FINISH, orders.wants_changes);
  if (orders.wants_changes) combine_changes();
}

inline void device_step(CudaTable& table, const StepOrders& orders = {}) {
  table.bind();
  table.settings().is_measured = orders.measures ? 1 : 0;
  if (orders.measures) {
    ASSERT_EQ(tradewind_cuda_measure(&table.c(), nullptr, nullptr), 0) << cuda_emulation::failure();
    ASSERT_EQ(tradewind_cuda_combine(&table.c(), nullptr), 0) << cuda_emulation::failure();
  }
  ASSERT_EQ(tradewind_cuda_control(&table.c(), nullptr), 0) << cuda_emulation::failure();
  for (int rule_idx = 0; rule_idx < num_rules(); ++rule_idx) {
    for (const bool is_double : {false, true}) sweep_rule(table, rule_idx, is_double, orders);
  }
}

// --- the CPU ------------------------------------------------------------------------------------

inline SweepSlot sweep_slot(CudaEntry& entry) {
  const CudaSlotSpec& spec = entry.spec;
  SweepSlot slot;
  slot.dtype = static_cast<DType>(spec.parameter);
  slot.gradient_dtype = static_cast<DType>(spec.gradient);
  slot.master = spec.master;
  slot.parameter = entry.parameter.data();
  slot.gradient = entry.gradient.data();
  slot.master_data = entry.master.data();
  for (std::size_t s = 0; s < kMaxStates; ++s) {
    slot.states[s] = entry.states[s].data();
    slot.state_formats[s] = spec.states[s];
    slot.exponents[s] = entry.exponents[s].as<std::uint8_t>();
  }
  slot.num_elements = spec.num_elements;
  slot.rule_idx = spec.rule_idx;
  slot.sign = spec.sign;
  slot.matrix_scale = 0.375;
  return slot;
}

struct CpuStep {
  Measure measure;
  Sweep sweep;
  std::vector<SweepSlot> slots;
  double norm = 0.0;
  double clip_factor = 1.0;
};

// Without a veto; `unscale`: what gradients are multiplied by before they are clipped.
inline std::unique_ptr<CpuStep> cpu_step(CudaTable& table, double unscale, double max_norm,
                                         std::uint64_t seed, const StepOrders& orders = {}) {
  auto cpu = std::make_unique<CpuStep>();
  const Kernels& kernels = kernels_for("baseline");
  for (CudaEntry& entry : table.entries()) cpu->slots.push_back(sweep_slot(entry));
  if (orders.measures) {
    cpu->measure.begin(cpu->slots);
    cpu->measure.run(kernels, kSerial);
    cpu->norm = cpu->measure.norm() * unscale;
    if (max_norm >= 0.0) cpu->clip_factor = clip_factor(cpu->norm, max_norm);
  }
  std::vector<ScalarBlock> scalars(cpu->slots.size());
  if (table.groups().empty()) table.add_groups();
  for (std::size_t i = 0; i < cpu->slots.size(); ++i) {
    CudaEntry& entry = table.entries()[i];
    const CudaSlotSpec& spec = entry.spec;
    std::int64_t step = 1;
    if (entry.step.data() != nullptr) {
      *entry.step.as<float>() += 1.0F;
      step = std::llround(*entry.step.as<float>());
    }
    const auto fill = spec.is_double() ? spec.rule().scalars_double : spec.rule().scalars_float;
    fill(table.groups()[static_cast<std::size_t>(spec.rule_idx)].options, step,
         *entry.has_stepped.as<std::uint8_t>() == 0, &scalars[i]);
    *entry.has_stepped.as<std::uint8_t>() = 1;
    cpu->slots[i].scalars_idx = static_cast<std::int64_t>(i);
    cpu->slots[i].random_key = random_key(seed, step, 1000 + static_cast<std::int64_t>(i));
  }
  const MatrixTransform transform = [&](std::int64_t slot_idx, void* direction) {
    const CudaSlotSpec& spec = table.entries()[static_cast<std::size_t>(slot_idx)].spec;
    transform_direction(spec.is_double(), spec.num_elements, direction);
  };
  const Sweep::Options options{unscale * cpu->clip_factor, orders.wants_changes, &transform};
  cpu->sweep.run(cpu->slots, scalars, options, kernels, kSerial);
  return cpu;
}

// Clears what the emulation has counted and found, and expects of every test that it found nothing.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    cuda_emulation::failure().clear();
    cuda_emulation::counts() = {};
    cuda_emulation::set_order(0);
  }
  void TearDown() override { EXPECT_EQ(cuda_emulation::failure(), ""); }
};

}  // namespace tradewind
