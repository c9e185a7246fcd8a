// What a step moves and launches, counted: bytes to and from arrays per element, and kernels
// whatever the number of tensors.
#include <gtest/gtest.h>

#include "step/cuda_steps.h"

namespace tradewind {
namespace {

class CudaTraffic : public CudaTest {};

constexpr std::int64_t kNumElements = 5 * kNormBlockElements;

CudaTable one_slot(const char* rule, Format parameter, Format gradient, Master master,
                   Format state) {
  CudaSlotSpec spec;
  spec.rule_idx = find_rule(rule);
  spec.num_elements = kNumElements;
  spec.parameter = parameter;
  spec.gradient = gradient;
  spec.master = master;
  spec.states = {state, state, state};
  CudaTable table;
  table.add(spec);
  table.settings().gradient_multiplier = 1.0;
  return table;
}

struct Bytes {
  double loaded, stored;
};

// Of one sweep, per element.
Bytes sweep_bytes(CudaTable table, int phase = TRADEWIND_CUDA_UPDATE, bool wants_changes = false) {
  table.bind();
  EXPECT_EQ(tradewind_cuda_control(&table.c(), nullptr), 0);
  const CudaSlotSpec& spec = table.entries()[0].spec;
  cuda_emulation::counts() = {};
  EXPECT_EQ(tradewind_cuda_sweep(&table.c(), nullptr, spec.rule_idx, spec.is_double() ? 1 : 0,
                                 phase, wants_changes ? 1 : 0, nullptr),
            0)
      << cuda_emulation::failure();
  EXPECT_EQ(cuda_emulation::counts().launches, 1);
  const auto count = static_cast<double>(kNumElements);
  return {static_cast<double>(cuda_emulation::counts().loaded_bytes) / count,
          static_cast<double>(cuda_emulation::counts().stored_bytes) / count};
}

TEST_F(CudaTraffic, ASweepMovesEachArrayOnce) {
  using enum Format;
  struct Case {
    const char* rule;
    Format parameter, gradient;
    Master master;
    Format state;
    double loaded, stored;
  };
  // Stored exponents of 8-bit states: one byte for 256 elements and state.
  constexpr double kExponents = 2.0 / 256.0;
  const Case cases[] = {
      {"adamw", kFloat32, kFloat32, Master::kNone, kFloat32, 16, 12},
      {"adamw_amsgrad", kFloat32, kFloat32, Master::kNone, kFloat32, 20, 16},
      {"sgd", kFloat32, kFloat32, Master::kNone, kFloat32, 8, 4},
      {"lion", kFloat32, kFloat32, Master::kNone, kFloat32, 12, 8},
      {"adamw", kFloat64, kFloat64, Master::kNone, kFloat64, 32, 24},
      // A float32 master is read instead of the parameter, and both are written.
      {"adamw", kBFloat16, kBFloat16, Master::kFloat32, kFloat32, 4 + 2 + 8, 4 + 2 + 8},
      {"adamw", kBFloat16, kFloat32, Master::kFloat32, kFloat32, 4 + 4 + 8, 4 + 2 + 8},
      {"adamw", kBFloat16, kBFloat16, Master::kSplit, kFloat32, 2 + 2 + 2 + 8, 2 + 2 + 8},
      {"adamw", kBFloat16, kBFloat16, Master::kNone, kStochasticBFloat16, 2 + 2 + 4, 2 + 4},
      {"adamw", kBFloat16, kBFloat16, Master::kSplit, kSigned8, 4 + 2 + 2, 4 + 2 + kExponents},
      {"adamw", kFloat16, kFloat16, Master::kNone, kFloat16, 2 + 2 + 4, 2 + 4},
  };
  for (const Case& one : cases) {
    const Bytes moved =
        sweep_bytes(one_slot(one.rule, one.parameter, one.gradient, one.master, one.state));
    EXPECT_EQ(moved.loaded, one.loaded) << one.rule << " of format " << int(one.parameter);
    EXPECT_EQ(moved.stored, one.stored) << one.rule << " of format " << int(one.parameter);
  }
}

// Rules in two phases: the parameter is read twice, the states are written once.
TEST_F(CudaTraffic, TwoPhasesMoveWhatEachNeeds) {
  constexpr double kChanges = 16.0 / kNormBlockElements;
  const CudaTable lamb =
      one_slot("lamb", Format::kFloat32, Format::kFloat32, Master::kNone, Format::kFloat32);
  const Bytes advance = sweep_bytes(lamb, TRADEWIND_CUDA_UPDATE, true);
  EXPECT_EQ(advance.loaded, 16.0);
  EXPECT_EQ(advance.stored, 8.0 + kChanges);
  const Bytes finish = sweep_bytes(lamb, TRADEWIND_CUDA_FINISH);
  EXPECT_EQ(finish.loaded, 12.0);
  EXPECT_EQ(finish.stored, 4.0);
  const CudaTable muon =
      one_slot("muon", Format::kFloat32, Format::kFloat32, Master::kNone, Format::kFloat32);
  const Bytes direction = sweep_bytes(muon);
  EXPECT_EQ(direction.stored, 8.0);  // state and direction
  const Bytes applied = sweep_bytes(muon, TRADEWIND_CUDA_FINISH);
  EXPECT_EQ(applied.loaded, 8.0);
  EXPECT_EQ(applied.stored, 4.0);
}

TEST_F(CudaTraffic, TheMeasureReadsEachGradientOnce) {
  for (const Format format :
       {Format::kFloat32, Format::kFloat64, Format::kBFloat16, Format::kFloat16}) {
    CudaTable table = one_slot("sgd", Format::kFloat32, format, Master::kNone, Format::kFloat32);
    table.bind();
    cuda_emulation::counts() = {};
    EXPECT_EQ(tradewind_cuda_measure(&table.c(), nullptr, nullptr), 0);
    EXPECT_EQ(cuda_emulation::counts().loaded_bytes, kNumElements * format_bytes(format));
    EXPECT_EQ(cuda_emulation::counts().stored_bytes, 5 * 24);  // a measure for each norm block
    EXPECT_EQ(cuda_emulation::counts().launches, 1);
  }
}

TEST_F(CudaTraffic, IngestReadsBothAndWritesOne) {
  CudaTable table =
      one_slot("sgd", Format::kFloat32, Format::kFloat32, Master::kNone, Format::kFloat32);
  GuardedBytes source = sample_bytes(Format::kBFloat16, kNumElements, 0, 1);
  const TradewindCudaSource sources[] = {{source.data(), static_cast<int>(Format::kBFloat16)}};
  table.bind();
  for (const bool overwrites : {false, true}) {
    cuda_emulation::counts() = {};
    EXPECT_EQ(tradewind_cuda_ingest(&table.c(), nullptr, sources, overwrites ? 1 : 0, 1, nullptr),
              0);
    EXPECT_EQ(cuda_emulation::counts().loaded_bytes, kNumElements * (overwrites ? 2 : 6));
    EXPECT_EQ(cuda_emulation::counts().stored_bytes, kNumElements * 4 + 5 * 24);
    EXPECT_EQ(cuda_emulation::counts().launches, 1);
  }
}

// A vetoed sweep touches no array.
TEST_F(CudaTraffic, AVetoMovesNothing) {
  CudaTable table =
      one_slot("adamw", Format::kFloat32, Format::kFloat32, Master::kNone, Format::kFloat32);
  const float found = 1.0F;
  table.settings().found_inf = &found;
  const Bytes moved = sweep_bytes(table);
  EXPECT_EQ(moved.loaded, 0.0);
  EXPECT_EQ(moved.stored, 0.0);
}

TEST_F(CudaTraffic, LaunchesDoNotGrowWithTensors) {
  for (const int num_slots : {1, 3, 3000}) {
    CudaTable table;
    for (int i = 0; i < num_slots; ++i) {
      CudaSlotSpec spec;
      spec.rule_idx = find_rule("adamw");
      spec.num_elements = i % 5 == 4 ? 0 : 10 + i % 50;
      table.add(spec);
    }
    table.settings().gradient_multiplier = 1.0;
    cuda_emulation::counts() = {};
    device_step(table);
    // measure, two to combine, decide, plan, sweep
    EXPECT_EQ(cuda_emulation::counts().launches, 6) << num_slots << " slots";
  }
}

}  // namespace
}  // namespace tradewind
