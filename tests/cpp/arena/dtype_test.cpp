#include "arena/dtype.h"

#include <gtest/gtest.h>

#include <complex>
#include <set>
#include <string>

namespace tradewind {
namespace {

TEST(DType, BytesAreThoseOfTheTypes) {
  EXPECT_EQ(element_bytes(DType::kFloat32), sizeof(float));
  EXPECT_EQ(element_bytes(DType::kFloat64), sizeof(double));
  EXPECT_EQ(element_bytes(DType::kBFloat16), 2);
  EXPECT_EQ(element_bytes(DType::kFloat16), 2);
  EXPECT_EQ(element_bytes(DType::kInt8), 1);
  EXPECT_EQ(element_bytes(DType::kUInt8), 1);
  EXPECT_EQ(element_bytes(DType::kInt16), 2);
  EXPECT_EQ(element_bytes(DType::kInt32), 4);
  EXPECT_EQ(element_bytes(DType::kInt64), 8);
  EXPECT_EQ(element_bytes(DType::kBool), 1);
  EXPECT_EQ(element_bytes(DType::kComplex64), sizeof(std::complex<float>));
  EXPECT_EQ(element_bytes(DType::kComplex128), sizeof(std::complex<double>));
}

TEST(DType, TheFloatingOnesComeFirst) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const std::string name(dtype_name(static_cast<DType>(i)));
    const bool has_float = name.find("float") != std::string::npos;
    EXPECT_EQ(is_floating(static_cast<DType>(i)), has_float) << name;
  }
}

TEST(DType, NamesDiffer) {
  std::set<std::string_view> names;
  for (int i = 0; i < kNumDTypes; ++i) names.insert(dtype_name(static_cast<DType>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kNumDTypes));
}

}  // namespace
}  // namespace tradewind
