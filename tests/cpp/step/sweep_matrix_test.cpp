// Rules that need whole matrices: the caller's transform sees each direction once, complete.
#include <gtest/gtest.h>

#include "base/error_matching.h"
#include "base/threaded_parallel.h"
#include "step/sweep_case.h"

namespace tradewind {
namespace {

TEST(SweepMatrix, WithoutATransformNothingIsChanged) {
  SlotTable table = SlotTable::mixed();
  const SlotTable before = table;
  const std::vector<ScalarBlock> scalars = table.scalars();
  Sweep sweep;
  for (const bool wants_changes : {false, true}) {
    expect_error(ErrorKind::kBadState, {"sweep", "matrices", "MatrixTransform"}, [&] {
      sweep.run(table.slots(), scalars, {.wants_changes = wants_changes}, kernels(), kSerial);
    });
    EXPECT_TRUE(table == before);
  }
}

TEST(SweepMatrix, WithoutAMatrixRuleNoTransformIsNeeded) {
  SlotTable table;
  table.add(DType::kFloat32, find_rule("adamw"), 5000);
  table.add(DType::kFloat32, find_rule("lamb"), 5000);
  const SlotTable before = table;
  Sweep sweep;
  sweep.run(table.slots(), table.scalars(), {}, kernels(), kSerial);
  EXPECT_FALSE(table == before);
}

TEST(SweepMatrix, TheTransformSeesEachSlotsDirectionOnceAndWhole) {
  SlotTable table;
  table.add(DType::kFloat32, find_rule("muon"), 50'000);
  table.add(DType::kFloat32, find_rule("adamw"), 5000);
  table.add(DType::kFloat64, find_rule("muon"), 9000);
  table.add(DType::kBFloat16, find_rule("muon"), 3);
  std::vector<std::vector<double>> expected;
  for (const SlotTable::Entry& entry : table.entries()) {
    Update update = entry.update;
    update.multiplier = 0.37;
    UpdateArrays before = entry.arrays;
    const Format format = entry.storage.is_double() ? Format::kFloat64 : Format::kFloat32;
    before.direction = encode_array(format, std::vector<double>(before.parameter.size()));
    expected.push_back(decode_array<double>(
        expected_update(entry.storage, update, Phase::kUpdate, before).arrays.direction));
  }
  std::vector<std::int64_t> seen;
  const MatrixTransform transform = [&](std::int64_t slot_idx, void* direction) {
    const auto idx = static_cast<std::size_t>(slot_idx);
    seen.push_back(slot_idx);
    for (std::size_t i = 0; i < expected[idx].size(); ++i) {
      const double value = table.entries()[idx].storage.is_double()
                               ? static_cast<double*>(direction)[i]
                               : double{static_cast<float*>(direction)[i]};
      ASSERT_EQ(value, expected[idx][i]) << slot_idx << ", " << i;
    }
  };
  Sweep sweep;
  sweep.run(table.slots(), table.scalars(), {.gradient_multiplier = 0.37, .transform = &transform},
            kernels(), kThreads<7>);
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 2, 3}));
}

TEST(SweepMatrix, TheDirectionIsScaledByTheSlotsFactor) {
  SlotTable table;
  for (const double scale : {1.0, 0.25}) {
    table.add(DType::kFloat64, find_rule("muon"), 2);
    SlotTable::Entry& entry = table.entries().back();
    entry.arrays.parameter = encode_array<double>(Format::kFloat64, {1.0, 2.0});
    entry.arrays.gradient = encode_array<double>(Format::kFloat64, {4.0, 8.0});
    entry.arrays.states[0] = encode_array<double>(Format::kFloat64, {0.0, 0.0});
    entry.update.options = {0.5, 0.5, 0.0, 0.0};  // the direction is half of the gradient
    entry.update.scale = scale;
  }
  SlotTable after = swept(table, 1.0, kernels(), kSerial);  // reversed and halved
  EXPECT_EQ(decode_array<double>(after.entries()[0].arrays.parameter),
            (std::vector<double>{1.0 - 0.5 * 2.0, 2.0 - 0.5 * 1.0}));
  EXPECT_EQ(decode_array<double>(after.entries()[1].arrays.parameter),
            (std::vector<double>{1.0 - 0.125 * 2.0, 2.0 - 0.125 * 1.0}));
}

}  // namespace
}  // namespace tradewind
