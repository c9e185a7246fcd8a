// Which kernels a process gets. How the ISA is chosen: base/isa_test.cpp.
#include <gtest/gtest.h>

#include <iterator>
#include <set>

#include "base/error_matching.h"
#include "base/isa_choice.h"
#include "step/kernels.h"
#include "step/rules/all.h"

namespace tradewind {
namespace {

TEST(Isa, EveryNameHasItsTable) {
  for (const std::string_view name : supported_isas()) EXPECT_EQ(kernels_for(name).isa, name);
  expect_error(ErrorKind::kBadValue, {"TRADEWIND_ISA", "'sse9'"}, [] { kernels_for("sse9"); });
}

TEST(Isa, AProcessGetsTheTableThatItsEnvironmentNames) {
  const auto chosen = [](const char* wanted) {
    return answer_with_isa(wanted, [] { return std::string(kernels().isa); });
  };
  EXPECT_EQ(chosen(nullptr), supported_isas().back());
  for (const std::string_view name : supported_isas()) {
    EXPECT_EQ(chosen(std::string(name).c_str()), name);
  }
  EXPECT_NE(chosen("mmx").find("'mmx'"), std::string::npos);
}

TEST(Isa, TablesHaveEveryKernelAndShareNone) {
  std::set<SweepKernel> sweeps;
  std::set<MeasureKernel> measures;
  std::size_t num_sweeps = 0;
  for (const std::string_view name : supported_isas()) {
    const Kernels& table = kernels_for(name);
    for (std::size_t i = 0; i < std::size(table.sweep); ++i) {
      const bool is_rule = i < rules().size();
      const bool has_finish = is_rule && rules()[i].needs != Needs::kElement;
      for (const auto& phases : table.sweep[i]) {
        EXPECT_EQ(phases[0] != nullptr, is_rule) << i;
        EXPECT_EQ(phases[1] != nullptr, has_finish) << i;
        for (const SweepKernel kernel : phases) {
          if (kernel == nullptr) continue;
          sweeps.insert(kernel);
          ++num_sweeps;
        }
      }
    }
    for (const MeasureKernel kernel : table.measure) measures.insert(kernel);
  }
  EXPECT_FALSE(measures.contains(nullptr));
  EXPECT_EQ(sweeps.size(), num_sweeps);
  EXPECT_EQ(measures.size(), supported_isas().size() * kNumFloatingDTypes);
}

}  // namespace
}  // namespace tradewind
