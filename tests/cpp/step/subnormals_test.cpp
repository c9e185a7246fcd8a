// torch.set_flush_denormal is per thread: a kernel must give the same bits whatever the calling
// thread's mode is, and leave that mode as it was.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "step/sweep_case.h"

#if defined(__x86_64__)
#include <xmmintrin.h>

namespace tradewind {
namespace {

constexpr unsigned kFlushToZero = 0x8000;
constexpr unsigned kDenormalsAreZero = 0x0040;

// Sets the thread's mode for the life of the object.
class FloatingPointMode {
 public:
  explicit FloatingPointMode(unsigned bits) : saved_(_mm_getcsr()) {
    _mm_setcsr((saved_ & ~(kFlushToZero | kDenormalsAreZero)) | bits);
    set_ = _mm_getcsr();
  }
  ~FloatingPointMode() { _mm_setcsr(saved_); }
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;

  [[nodiscard]] bool is_unchanged() const { return _mm_getcsr() == set_; }

 private:
  unsigned saved_;
  unsigned set_;
};

constexpr unsigned kModes[] = {0, kFlushToZero, kDenormalsAreZero,
                               kFlushToZero | kDenormalsAreZero};

class Subnormals : public testing::TestWithParam<std::string_view> {
 protected:
  [[nodiscard]] const Kernels& kernels() const { return kernels_for(GetParam()); }
};

StoredArray subnormals(Format format, std::uint64_t seed, std::size_t num_elements) {
  SplitMix random(seed);
  std::vector<double> values;
  visit_format(sampled_dtype(format), [&]<class Type>() {
    for (std::size_t i = 0; i < num_elements; ++i) {
      values.push_back(static_cast<double>(1 + random.below(60)) * smallest_value<Type>());
    }
  });
  return encode_array(format, values);
}

TEST_P(Subnormals, SweepsKeepThemInEveryMode) {
  using enum Format;
  Update update{find_rule("sgd_momentum"), {0.5, 0.5, 0.0, 0.0, 0.0}, 2, false, 1.0};
  const Storage storages[] = {uniform_storage(kFloat32),
                              uniform_storage(kFloat64),
                              uniform_storage(kBFloat16),
                              uniform_storage(kFloat16),
                              {kBFloat16, Master::kSplit, kFloat32, {kStochasticBFloat16}}};
  for (const Storage& storage : storages) {
    UpdateArrays before{subnormals(storage.parameter, 1, 100),
                        {},
                        subnormals(storage.gradient, 2, 100),
                        {subnormals(storage.states[0], 3, 100)},
                        {}};
    if (storage.master == Master::kSplit) {
      encode_parameter(storage.master, decode_array<float>(subnormals(kFloat32, 4, 100)), before);
    }
    const Expected expected = expected_update(storage, update, Phase::kUpdate, before);
    EXPECT_FALSE(expected.arrays.parameter == before.parameter);
    for (const unsigned mode : kModes) {
      bool is_unchanged = false;
      UpdateArrays got;
      {
        const FloatingPointMode thread_mode(mode);
        got = run_kernel({kernels(), storage, update}, before, nullptr);
        is_unchanged = thread_mode.is_unchanged();
      }
      EXPECT_TRUE(is_unchanged) << "mode " << mode;
      EXPECT_TRUE(got == expected.arrays) << "mode " << mode;
    }
  }
}

TEST_P(Subnormals, MeasuresKeepThemInEveryMode) {
  for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
    const StoredArray values = subnormals(static_cast<Format>(dtype), 4, 75);
    double expected = 0.0;  // small integers times one square: every sum is exact
    double largest = 0.0;
    for (const double value : decode_array<double>(values)) {
      expected += value * value;
      largest = std::fmax(largest, value);
    }
    for (const unsigned mode : kModes) {
      BlockMeasure block{-1.0, -1.0, -1};
      bool is_unchanged = false;
      {
        const FloatingPointMode thread_mode(mode);
        kernels().measure[dtype](values.bytes.data(), 75, &block);
        is_unchanged = thread_mode.is_unchanged();
      }
      EXPECT_TRUE(is_unchanged) << "mode " << mode;
      EXPECT_EQ(block.sum_of_squares, expected) << "mode " << mode;
      EXPECT_EQ(block.max_abs, largest) << "mode " << mode;
      EXPECT_EQ(block.num_zeros, 0) << "mode " << mode;
      // Squares of float64 subnormals are zero in any mode.
      EXPECT_EQ(block.sum_of_squares > 0.0, static_cast<DType>(dtype) != DType::kFloat64);
    }
  }
}

TEST_P(Subnormals, NormsKeepThemInEveryMode) {
  // Squares near 1e-320, and blocks and slots enough to add.
  std::vector<double> gradient(9000, 1e-160);
  SweepSlot slot;
  slot.dtype = DType::kFloat64;
  slot.gradient_dtype = DType::kFloat64;
  slot.gradient = gradient.data();
  slot.num_elements = 9000;
  const std::vector<SweepSlot> slots{slot, slot};
  double sums[std::size(kModes)];
  double norms[std::size(kModes)];
  for (std::size_t i = 0; i < std::size(kModes); ++i) {
    bool is_unchanged = false;
    Measure measure;
    {
      const FloatingPointMode thread_mode(kModes[i]);
      measure.begin(slots);
      measure.run(kernels(), kSerial);
      norms[i] = measure.norm();
      is_unchanged = thread_mode.is_unchanged();
    }
    sums[i] = measure.sum_of_squares();
    EXPECT_TRUE(is_unchanged) << "mode " << kModes[i];
    EXPECT_EQ(sums[i], sums[0]) << "mode " << kModes[i];
    EXPECT_EQ(norms[i], norms[0]) << "mode " << kModes[i];
  }
  EXPECT_GT(sums[0], 0.0);
  EXPECT_LT(sums[0], std::numeric_limits<double>::min());
  EXPECT_EQ(norms[0], std::sqrt(sums[0]));
}

// A norm near 1e-158, whose square is subnormal: the scale would be 1 where it were taken for zero.
TEST_P(Subnormals, SweepsWithNormsKeepThemInEveryMode) {
  SlotTable before;
  before.add(DType::kFloat64, find_rule("lamb"), 5000);
  SlotTable::Entry& entry = before.entries()[0];
  entry.arrays.parameter = encode_array(Format::kFloat64, std::vector<double>(5000, 1e-160));
  const UpdateArrays expected = expected_entry(entry, 1.0).arrays;
  for (const unsigned mode : kModes) {
    Sweep sweep;
    SlotTable after;
    bool is_unchanged = false;
    {
      const FloatingPointMode thread_mode(mode);
      after = swept(before, 1.0, kernels(), kSerial, true, &sweep);
      is_unchanged = thread_mode.is_unchanged();
    }
    EXPECT_TRUE(is_unchanged) << "mode " << mode;
    EXPECT_TRUE(after.entries()[0].arrays == expected) << "mode " << mode;
    EXPECT_GT(sweep.changes()[0].parameter_squares, 0.0) << "mode " << mode;
    EXPECT_LT(sweep.changes()[0].parameter_squares, std::numeric_limits<double>::min());
  }
}

INSTANTIATE_TEST_SUITE_P(All, Subnormals, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tradewind

#else

TEST(Subnormals, ModesOfThisProcessor) { GTEST_SKIP() << "MXCSR exists on x86-64 alone"; }

#endif
