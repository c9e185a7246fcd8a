#include "base/fingerprint.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace tradewind {
namespace {

template <class... Values>
std::uint64_t fingerprint_of(const Values&... values) {
  Fingerprint fingerprint;
  (fingerprint.add(values), ...);
  return fingerprint.value();
}

// Expected values come from an FNV-1a written in another language.
TEST(Fingerprint, IsFnv1aOverLittleEndianBytes) {
  EXPECT_EQ(Fingerprint().hex(), "cbf29ce484222325");
  EXPECT_EQ(fingerprint_of(std::int64_t{1}), 0x89CD31291D2AEFA4U);
  EXPECT_EQ(fingerprint_of(std::int64_t{-1}), 0x8CF51A8BFCA3883DU);
  EXPECT_EQ(fingerprint_of(std::int64_t{0x6E69776564617274}), 0x354E035C33A80975U);  // "tradewin"
  EXPECT_EQ(fingerprint_of(std::string_view("weight"), std::int64_t{4096}), 0xA16B7B51B2AC1D0FU);
}

TEST(Fingerprint, TellsTheSplitOfTextApart) {
  using Text = std::string_view;
  EXPECT_NE(fingerprint_of(Text("ab"), Text("c")), fingerprint_of(Text("a"), Text("bc")));
  EXPECT_NE(fingerprint_of(Text("")), fingerprint_of());
  EXPECT_NE(fingerprint_of(Text("a")), fingerprint_of(Text("b")));
}

TEST(Fingerprint, TellsOrderApart) {
  EXPECT_NE(fingerprint_of(std::int64_t{1}, std::int64_t{2}),
            fingerprint_of(std::int64_t{2}, std::int64_t{1}));
}

TEST(Fingerprint, HexIsSixteenLowerCaseDigits) {
  Fingerprint fingerprint;
  for (std::int64_t i = 0; i < 200; ++i) {
    fingerprint.add(i);
    const std::string hex = fingerprint.hex();
    EXPECT_EQ(hex.size(), 16U);
    EXPECT_EQ(hex.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_EQ(std::stoull(hex, nullptr, 16), fingerprint.value());
  }
}

}  // namespace
}  // namespace tradewind
