#include "share/codec.h"

#include <gtest/gtest.h>

#include "base/error_matching.h"

namespace tradewind {
namespace {

constexpr Codec kCodecs[] = {Codec::kNone, Codec::kBfloat16, Codec::kFloat16, Codec::kInt8};
static_assert(std::size(kCodecs) == kNumCodecs);

TEST(Codec, NamesComeBack) {
  for (const Codec codec : kCodecs) EXPECT_EQ(codec_named(name_of(codec)), codec);
  EXPECT_EQ(codec_named("none"), Codec::kNone);
  EXPECT_EQ(codec_named("bf16"), Codec::kBfloat16);
  EXPECT_EQ(codec_named("fp16"), Codec::kFloat16);
  EXPECT_EQ(codec_named("int8"), Codec::kInt8);
}

TEST(Codec, UnknownNamesAreRefusedWithTheKnownOnes) {
  using namespace std::string_literals;
  for (const std::string& name : {""s, "int4"s, "INT8"s, "int8 "s, "bf16\n"s, "float32"s}) {
    expect_error(ErrorKind::kBadValue,
                 {"codec: expected one of none, bf16, fp16, int8", "'" + name + "'"},
                 [&] { codec_named(name); });
  }
}

TEST(Codec, LossyOnesTakeWhatFloat32Holds) {
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    const auto type = static_cast<DType>(dtype);
    for (const Codec codec : kCodecs) {
      const bool is_lossy = codec != Codec::kNone;
      EXPECT_EQ(takes(codec, type), is_floating(type) && !(is_lossy && type == DType::kFloat64))
          << name_of(codec) << " " << dtype_name(type);
    }
  }
}

TEST(WireBytes, OfNoCodecAreTheValues) {
  for (const std::int64_t count : {0, 1, 3, 512, 1001}) {
    EXPECT_EQ(wire_bytes(Codec::kNone, DType::kFloat32, count), 4 * count);
    EXPECT_EQ(wire_bytes(Codec::kNone, DType::kFloat64, count), 8 * count);
    EXPECT_EQ(wire_bytes(Codec::kNone, DType::kBFloat16, count), 2 * count);
  }
}

TEST(WireBytes, OfLossyCodecsAreHeadersAndPaddedCodes) {
  struct Expected {
    std::int64_t num_elements, bfloat16, float16, int8;
  };
  for (const Expected& row :
       {Expected{0, 0, 0, 0}, Expected{1, 4, 8, 8}, Expected{2, 4, 8, 8}, Expected{3, 8, 12, 8},
        Expected{5, 12, 16, 12}, Expected{511, 1024, 1028, 516}, Expected{512, 1024, 1028, 516},
        Expected{513, 1028, 1036, 524}, Expected{1024, 2048, 2056, 1032}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      EXPECT_EQ(wire_bytes(Codec::kBfloat16, dtype, row.num_elements), row.bfloat16);
      EXPECT_EQ(wire_bytes(Codec::kFloat16, dtype, row.num_elements), row.float16);
      EXPECT_EQ(wire_bytes(Codec::kInt8, dtype, row.num_elements), row.int8);
    }
  }
}

// 400 GB of gradients are one call.
TEST(WireBytes, DoNotOverflow) {
  constexpr std::int64_t kMany = std::int64_t{512} << 30;
  EXPECT_EQ(wire_bytes(Codec::kInt8, DType::kFloat32, kMany), (std::int64_t{516} << 30));
}

}  // namespace
}  // namespace tradewind
