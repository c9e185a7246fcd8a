// The loss scale that the device keeps.
#include <gtest/gtest.h>

#include "step/cuda_tables.h"

namespace tradewind {
namespace {

class CudaLossScale : public CudaTest {};

// torch's _amp_update_scale_, with a floor.
struct Scaler {
  float scale = 65536.0F;
  int tracker = 0;

  void update(bool found_inf, const TradewindCudaSettings& settings) {
    if (found_inf) {
      scale = static_cast<float>(scale * settings.backoff_factor);
      scale = std::max(scale, static_cast<float>(settings.min_loss_scale));
      tracker = 0;
    } else if (++tracker == settings.growth_interval) {
      const auto grown = static_cast<float>(scale * settings.growth_factor);
      if (std::isfinite(grown)) scale = grown;
      tracker = 0;
    }
  }
};

void control(CudaTable& table) {
  ASSERT_EQ(tradewind_cuda_control(&table.c(), nullptr), 0) << cuda_emulation::failure();
}

TEST_F(CudaLossScale, GrowsAndBacksOffAsTorchs) {
  CudaTable table = small_table();
  table.bind();
  TradewindCudaSettings& settings = table.settings();
  settings.is_measured = 1;
  settings.growth_factor = 1.7;
  settings.backoff_factor = 0.3;
  settings.growth_interval = 3;
  settings.min_loss_scale = 64.0;
  Scaler scaler;
  table.control().state.loss_scale = scaler.scale;
  SplitMix random(12);
  bool has_been_at_the_floor = false;
  for (int step = 0; step < 300; ++step) {
    // Bad times first, then good ones until the scale overflows float32.
    const bool found_inf = step < 100 ? random.below(3) == 0 : step % 50 == 49;
    table.control().outcome.num_nonfinite_slots = found_inf ? 1.0 : 0.0;
    const float used = scaler.scale;
    control(table);
    scaler.update(found_inf, settings);
    ASSERT_EQ(table.outcome().loss_scale, used) << "step " << step;
    ASSERT_EQ(table.outcome().vetoed, found_inf ? 1 : 0);
    ASSERT_EQ(table.control().state.loss_scale, scaler.scale) << "step " << step;
    ASSERT_EQ(table.control().state.growth_tracker, scaler.tracker) << "step " << step;
    has_been_at_the_floor = has_been_at_the_floor || scaler.scale == 64.0F;
  }
  EXPECT_TRUE(has_been_at_the_floor);
  EXPECT_EQ(table.control().state.num_steps + table.control().state.num_skipped, 300);
}

TEST_F(CudaLossScale, StopsAtTheLargestFinite) {
  CudaTable table = small_table();
  table.bind();
  table.settings().growth_factor = 2.0;
  table.settings().backoff_factor = 0.5;
  table.settings().growth_interval = 1;
  table.control().state.loss_scale = 0x1p126F;
  control(table);
  EXPECT_EQ(table.control().state.loss_scale, 0x1p127F);
  control(table);
  EXPECT_EQ(table.control().state.loss_scale, 0x1p127F);
  EXPECT_EQ(table.control().state.growth_tracker, 0);
}

TEST_F(CudaLossScale, AnExternalVetoBacksOffToo) {
  const float found = 1.0F;
  CudaTable table = small_table();
  table.bind();
  table.settings().found_inf = &found;
  table.settings().backoff_factor = 0.5;
  table.settings().growth_interval = 100;
  table.control().state = {0, 0, 8.0F, 5};
  control(table);
  EXPECT_EQ(table.control().state.loss_scale, 4.0F);
  EXPECT_EQ(table.control().state.growth_tracker, 0);
  EXPECT_EQ(table.outcome().vetoed, 1);
}

TEST_F(CudaLossScale, WithoutAnIntervalItIsLeftAlone) {
  CudaTable table = small_table();
  table.bind();
  table.control().state = {0, 0, 8.0F, 5};
  control(table);
  EXPECT_EQ(table.control().state.loss_scale, 8.0F);
  EXPECT_EQ(table.control().state.growth_tracker, 5);
  EXPECT_EQ(table.outcome().gradient_multiplier, 1.0);
}

TEST_F(CudaLossScale, IsTakenOutOfGradients) {
  CudaTable table = small_table();
  table.settings().growth_interval = 10;
  table.settings().growth_factor = 2.0;
  table.control().state.loss_scale = 256.0F;
  CudaTable cpu_table = table;
  device_step(table);
  cpu_step(cpu_table, 1.0 / 256.0, -1.0, 0);
  expect_same_memory(cpu_table, table);
}

}  // namespace
}  // namespace tradewind
