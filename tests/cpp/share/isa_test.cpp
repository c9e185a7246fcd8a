// Which sharing kernels a process gets. How the ISA is chosen: base/isa_test.cpp.
#include "base/isa.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error_matching.h"
#include "base/isa_choice.h"
#include "share/kernels.h"

namespace tradewind {
namespace {

TEST(ShareIsa, EveryNameHasItsTable) {
  for (const std::string_view name : supported_isas()) {
    EXPECT_EQ(share_kernels_for(name).isa, name);
  }
  expect_error(ErrorKind::kBadValue, {"TRADEWIND_ISA", "'sse9'"},
               [] { share_kernels_for("sse9"); });
}

TEST(ShareIsa, AProcessGetsTheTableThatItsEnvironmentNames) {
  const auto chosen = [](const char* wanted) {
    return answer_with_isa(wanted, [] { return std::string(share_kernels().isa); });
  };
  EXPECT_EQ(chosen(nullptr), supported_isas().back());
  for (const std::string_view name : supported_isas()) {
    EXPECT_EQ(chosen(std::string(name).c_str()), name);
  }
  EXPECT_NE(chosen("mmx").find("'mmx'"), std::string::npos);
}

TEST(ShareIsa, TablesHaveWhatTheCodecsTakeAndShareNone) {
  std::set<EncodeKernel> encodes;
  std::set<DecodeKernel> decodes;
  std::set<SumKernel> sums;
  std::size_t num_lossy = 0;
  std::size_t num_sums = 0;
  for (const std::string_view name : supported_isas()) {
    const ShareKernels& table = share_kernels_for(name);
    for (int codec = 0; codec < kNumCodecs; ++codec) {
      for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
        const bool is_taken = takes(static_cast<Codec>(codec), static_cast<DType>(dtype));
        const bool has_codes = is_taken && codec != static_cast<int>(Codec::kNone);
        EXPECT_EQ(table.encode[codec][dtype] != nullptr, has_codes);
        EXPECT_EQ(table.decode[codec][dtype] != nullptr, has_codes);
        EXPECT_EQ(table.sum[codec][dtype] != nullptr, is_taken);
        encodes.insert(table.encode[codec][dtype]);
        decodes.insert(table.decode[codec][dtype]);
        sums.insert(table.sum[codec][dtype]);
        num_lossy += has_codes ? 1 : 0;
        num_sums += is_taken ? 1 : 0;
      }
    }
  }
  EXPECT_EQ(encodes.size(), num_lossy + 1);  // and null
  EXPECT_EQ(decodes.size(), num_lossy + 1);
  EXPECT_EQ(sums.size(), num_sums + 1);
}

}  // namespace
}  // namespace tradewind
