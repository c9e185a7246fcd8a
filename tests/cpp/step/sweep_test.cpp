// The sweep over a table of slots of every storage and rule, against what each slot's two phases
// make of it by the tests' own definitions: to the bit.
#include "step/sweep.h"

#include <gtest/gtest.h>

#include "base/threaded_parallel.h"
#include "step/sweep_case.h"

namespace tradewind {
namespace {

TEST(Sweep, UpdatesEverySlotByItsOwnRuleAndFormats) {
  SlotTable before = SlotTable::mixed();
  SlotTable after = swept(before, 0.37, kernels(), kSerial);
  for (std::size_t i = 0; i < before.entries().size(); ++i) {
    const SlotTable::Entry& entry = before.entries()[i];
    expect_same_arrays(expected_entry(entry, 0.37).arrays, after.entries()[i].arrays,
                       entry.update.rule());
    if (HasFatalFailure()) {
      FAIL() << "slot " << i << " of " << entry.num_elements() << " elements, rule "
             << entry.update.rule().name << ", " << dtype_name(entry.dtype());
    }
  }
}

TEST(Sweep, AgreesWithTheOraclesWholeStep) {
  for (int rule_idx = 0; rule_idx < num_rules(); ++rule_idx) {
    SlotTable before;
    before.add(DType::kFloat64, rule_idx, 20'000);
    before.entries()[0].update.scale = 1.0;
    SlotTable after = swept(before, 0.37, kernels(), kSerial, /*is_transforming=*/false);
    const SlotTable::Entry& entry = before.entries()[0];
    OracleArrays<double> oracle{decode_array<double>(entry.arrays.parameter),
                                decode_array<double>(entry.arrays.gradient),
                                {}};
    for (const StoredArray& state : entry.arrays.states) {
      oracle.states.push_back(decode_array<double>(state));
    }
    const RuleInfo& rule = entry.update.rule();
    oracle_step<double>(rule.name, entry.update.options, 3, false, 0.37, oracle);
    const auto got = decode_array<double>(after.entries()[0].arrays.parameter);
    const auto was = decode_array<double>(entry.arrays.parameter);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (rule.needs != Needs::kNorms) {
        ASSERT_TRUE(same_value<Float64Format>(got[i], oracle.parameter[i])) << rule.name;
        continue;
      }
      // The order of the norms' sums alone differs: by norm block and lane here (139 roundings),
      // one after the other there (20,000). The root halves that, and there are two norms. Then one
      // rounding where the parameter is written.
      const double bound = 20'139 * 0x1p-53 * std::fabs(oracle.parameter[i] - was[i]) +
                           0x1p-52 * std::fabs(oracle.parameter[i]);
      ASSERT_NEAR(got[i], oracle.parameter[i], bound) << i;
    }
  }
}

// Threads cut the row of blocks at other places: formats that round at random see the place of an
// element in its parameter, never in the piece.
TEST(Sweep, GivesTheSameBitsOnEveryIsaAndThreadCount) {
  const SlotTable before = SlotTable::mixed();
  const SlotTable expected = swept(before, 0.37, kernels_for("baseline"), kSerial);
  EXPECT_FALSE(expected == before);
  for (const std::string_view isa : supported_isas()) {
    for (const Parallel& parallel : {kSerial, kThreads<1>, kThreads<2>, kThreads<7>}) {
      EXPECT_TRUE(swept(before, 0.37, kernels_for(isa), parallel) == expected) << isa;
    }
  }
}

TEST(Sweep, RandomRoundingFollowsTheSlotsKey) {
  const Storage storage{Format::kFloat32,
                        Master::kNone,
                        Format::kFloat32,
                        {Format::kStochasticBFloat16, Format::kSigned8}};
  SlotTable table;
  for (int i = 0; i < 3; ++i) table.add(storage, find_rule("adamw"), 5000);
  for (std::size_t i = 1; i < 3; ++i) table.entries()[i].arrays = table.entries()[0].arrays;
  table.entries()[2].update.random_key = table.entries()[0].update.random_key;
  const SlotTable before = table;
  table = swept(before, 1.0, kernels(), kThreads<2>);
  EXPECT_EQ(table.entries()[0].arrays, table.entries()[2].arrays);
  for (const std::size_t state : {0, 1}) {
    EXPECT_NE(table.entries()[0].arrays.states[state], table.entries()[1].arrays.states[state]);
  }
}

TEST(Sweep, SignMinusOneMaximizes) {
  SlotTable table;
  table.add(DType::kFloat32, find_rule("sgd"), 1, 1.0);
  table.add(DType::kFloat32, find_rule("sgd"), 1, -1.0);
  std::vector<SweepSlot> slots = table.slots();
  for (std::size_t i = 0; i < 2; ++i) {
    *static_cast<float*>(slots[i].parameter) = 1.0F;
    *table.gradient<float>(i) = 0.5F;
    slots[i].scalars_idx = 0;
  }
  const RuleInfo& rule = rules()[static_cast<std::size_t>(find_rule("sgd"))];
  const std::vector<ScalarBlock> scalars{
      scalars_for(rule, DType::kFloat32, {0.5, 0.0, 0.0, 0.0, 0.0}, 1, true)};
  Sweep sweep;
  sweep.run(slots, scalars, {.gradient_multiplier = 2.0}, kernels(), kSerial);
  EXPECT_EQ(*static_cast<float*>(slots[0].parameter), 0.5F);
  EXPECT_EQ(*static_cast<float*>(slots[1].parameter), 1.5F);
}

TEST(Sweep, NothingToDoIsFine) {
  Sweep sweep;
  sweep.run({}, {}, {.wants_changes = true}, kernels(), kThreads<2>);
  EXPECT_TRUE(sweep.changes().empty());
  SlotTable empty;
  for (int i = 0; i < num_rules(); ++i) empty.add(DType::kBFloat16, i, 0);
  for (const Parallel& parallel : {kSerial, kThreads<7>}) {
    EXPECT_TRUE(swept(empty, 1.0, kernels(), parallel) == empty);
  }
}

}  // namespace
}  // namespace tradewind
