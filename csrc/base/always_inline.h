// TRADEWIND_RULE marks what kernels are made of: units of every instruction set use such functions,
// and an out-of-line copy that the compiler made for one could be linked into another's kernels.
#pragma once

#if defined(__CUDACC__)
#define TRADEWIND_RULE __host__ __device__ __forceinline__
#else
#define TRADEWIND_RULE inline __attribute__((always_inline))
#endif
