#include "step/sweep.h"

#include <gtest/gtest.h>

#include <string>

#include "base/threaded_parallel.h"
#include "step/oracle.h"
#include "step/rules/all.h"
#include "step/slot_table.h"

namespace tradewind {
namespace {

SlotTable swept(SlotTable table, double multiplier, const Kernels& kernels,
                const Parallel& parallel) {
  const std::vector<ScalarBlock> scalars = table.scalars();
  sweep(table.slots(), scalars, multiplier, kernels, parallel);
  return table;
}

template <class Format>
std::vector<typename Format::Compute> decoded(const std::vector<std::byte>& bytes) {
  std::vector<typename Format::Stored> stored(bytes.size() / sizeof(typename Format::Stored));
  if (!stored.empty()) std::memcpy(stored.data(), bytes.data(), bytes.size());
  std::vector<typename Format::Compute> values;
  for (const auto value : stored) values.push_back(Format::decode(value));
  return values;
}

// What the oracle makes of one entry's parameter, in the stored format.
template <class Format>
std::vector<typename Format::Compute> expected_parameter(const SlotTable::Entry& entry,
                                                         double multiplier) {
  using Compute = typename Format::Compute;
  const RuleInfo& rule = rules()[static_cast<std::size_t>(entry.rule_idx)];
  OracleArrays<Compute> arrays{
      decoded<Format>(entry.arrays[0]), decoded<Format>(entry.arrays[1]), {}};
  for (std::size_t s = 0; s < rule.state_names.size(); ++s) {
    arrays.states.push_back(decoded<Format>(entry.arrays[2 + s]));
  }
  oracle_step<Compute>(rule.name, example_options(rule, false), 3, false,
                       static_cast<Compute>(multiplier * entry.sign), arrays);
  for (Compute& value : arrays.parameter) value = Format::decode(Format::encode(value));
  return arrays.parameter;
}

TEST(Sweep, UpdatesEverySlotByItsOwnRuleAndDType) {
  SlotTable before = SlotTable::mixed();
  SlotTable after = swept(before, 0.37, kernels(), kSerial);
  for (std::size_t i = 0; i < before.entries().size(); ++i) {
    const SlotTable::Entry& entry = before.entries()[i];
    visit_format(entry.dtype, [&]<class Format>() {
      EXPECT_EQ(decoded<Format>(after.entries()[i].arrays[0]),
                expected_parameter<Format>(entry, 0.37))
          << "slot " << i << ", rule " << entry.rule_idx << ", " << dtype_name(entry.dtype);
    });
    EXPECT_EQ(after.entries()[i].arrays[1], entry.arrays[1]) << "gradient of slot " << i;
  }
}

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
  sweep(slots, scalars, 2.0, kernels(), kSerial);
  EXPECT_EQ(*static_cast<float*>(slots[0].parameter), 0.5F);
  EXPECT_EQ(*static_cast<float*>(slots[1].parameter), 1.5F);
}

TEST(Sweep, NothingToDoIsFine) {
  sweep({}, {}, 1.0, kernels(), kThreads<2>);
  SlotTable empty;
  for (int i = 0; i < 5; ++i) empty.add(DType::kBFloat16, i % num_rules(), 0);
  for (const Parallel& parallel : {kSerial, kThreads<7>}) {
    EXPECT_TRUE(swept(empty, 1.0, kernels(), parallel) == empty);
  }
}

}  // namespace
}  // namespace tradewind
