// torch.set_flush_denormal is per thread: a kernel must give the same bits whatever the calling
// thread's mode is, and leave that mode as it was.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "step/kernel_case.h"
#include "step/sweep.h"

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

template <class Format>
std::vector<typename Format::Stored> subnormals(std::uint64_t seed, std::size_t num_elements) {
  SplitMix random(seed);
  std::vector<typename Format::Stored> values;
  for (std::size_t i = 0; i < num_elements; ++i) {
    values.push_back(
        Format::encode(static_cast<double>(1 + random.below(60)) * smallest_value<Format>()));
  }
  return values;
}

TEST_P(Subnormals, SweepsKeepThemInEveryMode) {
  const int rule_idx = find_rule("sgd_momentum");
  const Update update{rule_idx, {0.5, 0.5, 0.0, 0.0, 0.0}, 2, false, 1.0};
  for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
    visit_format(static_cast<DType>(dtype), [&]<class Format>() {
      const KernelArrays<Format> before{
          subnormals<Format>(1, 100), subnormals<Format>(2, 100), {subnormals<Format>(3, 100)}};
      const auto expected = expected_arrays<Format>(update, before);
      const auto kernel = kernels().sweep[rule_idx][dtype];
      for (const unsigned mode : kModes) {
        auto got = before;
        const ScalarBlock scalars =
            scalars_for(update.rule(), Format::kDType, update.options, 2, false);
        bool is_unchanged = false;
        {
          const FloatingPointMode thread_mode(mode);
          kernel({got.parameter.data(),
                  got.gradient.data(),
                  {got.states[0].data()},
                  100,
                  1.0,
                  &scalars});
          is_unchanged = thread_mode.is_unchanged();
        }
        EXPECT_TRUE(is_unchanged) << "mode " << mode;
        EXPECT_EQ(got.parameter, expected.parameter) << "mode " << mode;
        EXPECT_EQ(got.states[0], expected.states[0]) << "mode " << mode;
        EXPECT_NE(got.parameter, before.parameter);
      }
    });
  }
}

TEST_P(Subnormals, MeasuresKeepThemInEveryMode) {
  for (int dtype = 0; dtype < kNumFloatingDTypes; ++dtype) {
    visit_format(static_cast<DType>(dtype), [&]<class Format>() {
      const auto values = subnormals<Format>(4, 75);
      double expected = 0.0;  // small integers times one square: every sum is exact
      for (const auto value : values)
        expected += double{Format::decode(value)} * Format::decode(value);
      for (const unsigned mode : kModes) {
        double sum = -1.0;
        bool is_unchanged = false;
        {
          const FloatingPointMode thread_mode(mode);
          kernels().measure[dtype](values.data(), 75, &sum);
          is_unchanged = thread_mode.is_unchanged();
        }
        EXPECT_TRUE(is_unchanged) << "mode " << mode;
        EXPECT_EQ(sum, expected) << "mode " << mode;
        // Squares of float64 subnormals are zero in any mode.
        EXPECT_EQ(sum > 0.0, Format::kDType != DType::kFloat64);
      }
    });
  }
}

TEST_P(Subnormals, NormsKeepThemInEveryMode) {
  // Squares near 1e-320, and blocks and slots enough to add.
  std::vector<double> gradient(9000, 1e-160);
  const SweepSlot slot{DType::kFloat64, nullptr, gradient.data(), {}, 9000, 0, 1.0, 0};
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

INSTANTIATE_TEST_SUITE_P(All, Subnormals, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tradewind

#else

TEST(Subnormals, ModesOfThisProcessor) { GTEST_SKIP() << "MXCSR exists on x86-64 alone"; }

#endif
