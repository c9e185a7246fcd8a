// Which kernels a process gets. kernels() reads TRADEWIND_ISA once, so each case is a process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iterator>
#include <set>
#include <string>

#include "base/error_matching.h"
#include "step/kernels.h"
#include "step/rules/all.h"

namespace tradewind {
namespace {

TEST(Isa, BaselineIsTheFirstAndEveryNameIsTaken) {
  const auto names = supported_isas();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), "baseline");
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
  for (const std::string_view name : names) EXPECT_EQ(kernels_for(name).isa, name);
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

TEST(Isa, AnUnknownNameIsRefusedWithTheKnownOnes) {
  for (const std::string_view name : supported_isas()) {
    expect_error(ErrorKind::kBadValue, {"TRADEWIND_ISA", std::string(name), "'sse9'"},
                 [] { kernels_for("sse9"); });
  }
  expect_error(ErrorKind::kBadValue, {"TRADEWIND_ISA", "''"}, [] { kernels_for(""); });
}

// The name that kernels() gives a new process where TRADEWIND_ISA is `wanted`, or the error's text.
std::string chosen_isa(const char* wanted) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    wanted == nullptr ? unsetenv("TRADEWIND_ISA") : setenv("TRADEWIND_ISA", wanted, 1);
    std::string answer;
    try {
      answer = kernels().isa;
    } catch (const Error& error) {
      answer = error.what();
    }
    _exit(write(ends[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size()) ? 0
                                                                                              : 1);
  }
  close(ends[1]);
  char text[1024];
  const ssize_t length = read(ends[0], text, sizeof(text));
  close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return length < 0 ? "nothing" : std::string(text, static_cast<std::size_t>(length));
}

TEST(Isa, TheBestOneIsChosenUnlessTheEnvironmentNamesOne) {
  EXPECT_EQ(chosen_isa(nullptr), supported_isas().back());
  EXPECT_EQ(chosen_isa(""), supported_isas().back());
  for (const std::string_view name : supported_isas()) {
    EXPECT_EQ(chosen_isa(std::string(name).c_str()), name);
  }
}

TEST(Isa, AnUnknownNameInTheEnvironmentIsRefused) {
  const std::string answer = chosen_isa("mmx");
  EXPECT_NE(answer.find("TRADEWIND_ISA: expected one of baseline"), std::string::npos) << answer;
  EXPECT_NE(answer.find("'mmx'"), std::string::npos) << answer;
}

}  // namespace
}  // namespace tradewind
