#include <gtest/gtest.h>

#include <set>
#include <string>

#include "arena/layout.h"
#include "arena/random_layout.h"

namespace tradewind {
namespace {

const std::vector<SlotSpec> kSpecs{{"weight", {8, 3}, DType::kFloat32},
                                   {"bias", {8}, DType::kFloat32},
                                   {"scale", {}, DType::kBFloat16}};

// Checkpoints and ranks compare digests: where this value (made by an FNV-1a in another language)
// changes, kLayoutVersion must be raised.
TEST(Digest, IsWhatItWas) {
  EXPECT_EQ(kLayoutVersion, 1);
  EXPECT_EQ(Layout::make(kSpecs).digest(), "138b3163cfa3fd56");
}

TEST(Digest, SameInputSameDigest) {
  for (std::uint64_t seed = 0; seed < kNumRandomLayouts; ++seed) {
    const LayoutInput first = random_layout_input(seed);
    const LayoutInput second = random_layout_input(seed);
    EXPECT_EQ(Layout::make(first.specs, first.options).digest(),
              Layout::make(second.specs, second.options).digest());
  }
}

TEST(Digest, EveryChangeOfASlotShows) {
  std::set<std::string> digests{Layout::make(kSpecs).digest()};
  const auto add = [&](const char* what, std::vector<SlotSpec> specs) {
    EXPECT_TRUE(digests.insert(Layout::make(specs).digest()).second) << what;
  };
  for (std::size_t i = 0; i < kSpecs.size(); ++i) {
    std::vector<SlotSpec> specs = kSpecs;
    specs[i].name += "x";
    add("name", specs);
    specs = kSpecs;
    specs[i].shape.push_back(1);
    add("rank of the shape", specs);
    specs = kSpecs;
    specs[i].dtype = DType::kFloat64;
    add("dtype", specs);
    specs = kSpecs;
    specs.erase(specs.begin() + static_cast<std::ptrdiff_t>(i));
    add("a slot less", specs);
  }
  add("shape of as many elements", {{"weight", {3, 8}, DType::kFloat32}, kSpecs[1], kSpecs[2]});
  add("order", {kSpecs[1], kSpecs[0], kSpecs[2]});
  add("order of arenas", {kSpecs[2], kSpecs[0], kSpecs[1]});
  add("dtype of the same width", {kSpecs[0], kSpecs[1], {"scale", {}, DType::kFloat16}});
  add("an empty slot more", {kSpecs[0], kSpecs[1], kSpecs[2], {"e", {0}, DType::kFloat32}});
}

TEST(Digest, EveryChangeOfAnOptionShows) {
  std::set<std::string> digests{Layout::make(kSpecs).digest()};
  LayoutOptions options;
  options.slot_alignment_bytes = 128;
  EXPECT_TRUE(digests.insert(Layout::make(kSpecs, options).digest()).second);
  options = {};
  options.arena_alignment_bytes = 8192;
  EXPECT_TRUE(digests.insert(Layout::make(kSpecs, options).digest()).second);
  options = {};
  options.bucket_bytes += 1;
  EXPECT_TRUE(digests.insert(Layout::make(kSpecs, options).digest()).second);
}

}  // namespace
}  // namespace tradewind
