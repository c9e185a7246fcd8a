#include "base/isa.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace tradewind {
namespace {

constexpr std::string_view kNames[] = {"baseline", "avx2", "avx512"};

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return Isa::kAvx512;
    }
    return Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

Isa wanted_isa() {
  const char* wanted = std::getenv("TRADEWIND_ISA");
  return wanted == nullptr || *wanted == '\0' ? best_isa() : isa_named(wanted);
}

}  // namespace

std::vector<std::string_view> supported_isas() {
  return {kNames, kNames + static_cast<int>(best_isa()) + 1};
}

Isa isa_named(std::string_view name) {
  std::string known;
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    if (kNames[i] == name) return static_cast<Isa>(i);
    known += (known.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  fail(ErrorKind::kBadValue, "TRADEWIND_ISA: expected one of ", known, " on this processor, got '",
       name, "'");
}

Isa process_isa() {
  static const Isa kChosen = wanted_isa();
  return kChosen;
}

}  // namespace tradewind
