// Our declarations of NCCL's interface against its own header, where one is there.
#include <gtest/gtest.h>

#include "share/nccl_api.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

#include <cstddef>
#include <type_traits>

namespace tradewind::nccl {
namespace {

// Types that have one representation: pointers, enumerations and integers of one size, and the id.
template <class Ours, class Theirs>
constexpr bool is_like() {
  if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  } else if constexpr (std::is_class_v<Ours> || std::is_class_v<Theirs>) {
    return std::is_class_v<Ours> && std::is_class_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
           alignof(Ours) == alignof(Theirs);
  } else {
    return (std::is_enum_v<Ours> || std::is_integral_v<Ours>) && sizeof(Ours) == sizeof(Theirs);
  }
}

template <class Ours, class Theirs>
struct Signature;
template <class Ours, class... OurParameters, class Theirs, class... TheirParameters>
struct Signature<Ours (*)(OurParameters...), Theirs (*)(TheirParameters...)> {
  static constexpr bool kMatches = [] {
    if constexpr (sizeof...(OurParameters) != sizeof...(TheirParameters)) {
      return false;
    } else {
      return is_like<Ours, Theirs>() && (is_like<OurParameters, TheirParameters>() && ...);
    }
  }();
};

#define EXPECT_SIGNATURE(name) static_assert(Signature<name, decltype(&::nccl##name)>::kMatches)

EXPECT_SIGNATURE(GetVersion);
EXPECT_SIGNATURE(GetUniqueId);
EXPECT_SIGNATURE(GetErrorString);
EXPECT_SIGNATURE(GetLastError);
EXPECT_SIGNATURE(CommInitRankConfig);
EXPECT_SIGNATURE(CommFinalize);
EXPECT_SIGNATURE(CommDestroy);
EXPECT_SIGNATURE(CommAbort);
EXPECT_SIGNATURE(CommGetAsyncError);
EXPECT_SIGNATURE(GroupStart);
EXPECT_SIGNATURE(GroupEnd);
EXPECT_SIGNATURE(AllReduce);
EXPECT_SIGNATURE(ReduceScatter);
EXPECT_SIGNATURE(AllGather);
EXPECT_SIGNATURE(Broadcast);
EXPECT_SIGNATURE(Send);
EXPECT_SIGNATURE(Recv);
EXPECT_SIGNATURE(RedOpCreatePreMulSum);
EXPECT_SIGNATURE(RedOpDestroy);
#if NCCL_VERSION_CODE >= 21900
EXPECT_SIGNATURE(MemAlloc);
EXPECT_SIGNATURE(MemFree);
EXPECT_SIGNATURE(CommRegister);
EXPECT_SIGNATURE(CommDeregister);
#endif
#if NCCL_VERSION_CODE >= 22700
EXPECT_SIGNATURE(CommShrink);
static_assert(kShrinkDefault == NCCL_SHRINK_DEFAULT && kShrinkAbort == NCCL_SHRINK_ABORT);
static_assert(int{kBfloat16} == ncclBfloat16);  // in older headers only where CUDA's has it
#endif

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(version_code(2, 18, 5) == NCCL_VERSION(2, 18, 5));
static_assert(int{kSuccess} == ncclSuccess && int{kUnhandledCudaError} == ncclUnhandledCudaError);
static_assert(int{kSystemError} == ncclSystemError && int{kInternalError} == ncclInternalError);
static_assert(int{kInvalidArgument} == ncclInvalidArgument);
static_assert(int{kInvalidUsage} == ncclInvalidUsage && int{kRemoteError} == ncclRemoteError);
static_assert(int{kInProgress} == ncclInProgress);
static_assert(int{kInt8} == ncclInt8 && int{kUint8} == ncclUint8);
static_assert(int{kInt32} == ncclInt32 && int{kUint32} == ncclUint32);
static_assert(int{kInt64} == ncclInt64 && int{kUint64} == ncclUint64);
static_assert(int{kFloat16} == ncclFloat16 && int{kFloat32} == ncclFloat32);
static_assert(int{kFloat64} == ncclFloat64);
static_assert(int{kSum} == ncclSum && int{kProd} == ncclProd && int{kMax} == ncclMax);
static_assert(int{kMin} == ncclMin && int{kAvg} == ncclAvg);
static_assert(int{kScalarDevice} == ncclScalarDevice);
static_assert(int{kScalarHostImmediate} == ncclScalarHostImmediate);

static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));

TEST(NcclHeader, AFreshConfigurationIsMarkedLikeNccls) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(Config{}.magic, theirs.magic);
  EXPECT_LE(Config{}.size, theirs.size);
  EXPECT_LE(Config{}.version, theirs.version);
}

}  // namespace
}  // namespace tradewind::nccl

#else

TEST(NcclHeader, AFreshConfigurationIsMarkedLikeNccls) {
  GTEST_SKIP() << "nccl.h was not found; configure with -DTRADEWIND_NCCL_INCLUDE=its folder";
}

#endif
