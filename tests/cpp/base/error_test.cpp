#include "base/error.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error_matching.h"

namespace tradewind {
namespace {

TEST(Error, FailJoinsItsPartsAndKeepsItsKind) {
  expect_error(ErrorKind::kOutOfMemory, {"arena: wanted 12 bytes, got 0.5 and x"}, [] {
    fail(ErrorKind::kOutOfMemory, "arena: wanted ", 12, " bytes, got ", 0.5, " and ",
         std::string("x"));
  });
}

TEST(Error, IsAStandardException) {
  const Error error(ErrorKind::kBadType, "subject");
  const std::exception& standard = error;
  EXPECT_STREQ(standard.what(), "subject");
  EXPECT_EQ(error.kind(), ErrorKind::kBadType);
}

}  // namespace
}  // namespace tradewind
