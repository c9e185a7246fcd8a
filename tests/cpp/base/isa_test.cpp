#include "base/isa.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error_matching.h"
#include "base/isa_choice.h"

namespace tradewind {
namespace {

TEST(Isa, BaselineIsTheFirstAndEveryNameIsTaken) {
  const auto names = supported_isas();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), "baseline");
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(isa_named(names[i])), i);
  }
}

TEST(Isa, AnUnknownNameIsRefusedWithTheKnownOnes) {
  for (const std::string_view name : supported_isas()) {
    expect_error(ErrorKind::kBadValue, {"TRADEWIND_ISA", std::string(name), "'sse9'"},
                 [] { isa_named("sse9"); });
  }
  expect_error(ErrorKind::kBadValue, {"TRADEWIND_ISA", "''"}, [] { isa_named(""); });
}

std::string chosen_isa(const char* wanted) {
  return answer_with_isa(wanted, [] {
    return std::string(supported_isas()[static_cast<std::size_t>(process_isa())]);
  });
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
