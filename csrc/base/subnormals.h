// Keeps subnormal numbers for the life of one object, on the calling thread, and then restores what
// was. torch.set_flush_denormal is per thread: without this, two threads of one sweep could round
// differently. Always inlined, because units of every instruction set use it (see
// base/always_inline.h).
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tradewind {

class KeepSubnormals {
 public:
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

#if defined(__x86_64__)
  // Bits 15 and 6 of MXCSR: flush results to zero, take subnormal inputs as zero.
  __attribute__((always_inline)) KeepSubnormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ & ~0x8040U);
  }
  __attribute__((always_inline)) ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  // Bit 24 of FPCR: flush to zero.
  __attribute__((always_inline)) KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~(1ULL << 24)));
  }
  __attribute__((always_inline)) ~KeepSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  unsigned long long saved_;
#else
  __attribute__((always_inline)) KeepSubnormals() {}
  __attribute__((always_inline)) ~KeepSubnormals() {}
#endif
};

}  // namespace tradewind
