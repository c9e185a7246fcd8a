#include <cstdlib>
#include <string>

#include "base/error.h"
#include "step/kernels.h"

namespace tradewind {

namespace isa_baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const Kernels kKernels;
}
namespace isa_avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> supported{&isa_baseline::kKernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    supported.push_back(&isa_avx2::kKernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      supported.push_back(&isa_avx512::kKernels);
    }
  }
#endif
  return supported;
}

const Kernels& choose_kernels() {
  const char* wanted = std::getenv("TRADEWIND_ISA");
  if (wanted == nullptr || *wanted == '\0') return *supported_kernels().back();
  return kernels_for(wanted);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& kChosen = choose_kernels();
  return kChosen;
}

std::vector<std::string_view> supported_isas() {
  std::vector<std::string_view> names;
  for (const Kernels* table : supported_kernels()) names.push_back(table->isa);
  return names;
}

const Kernels& kernels_for(std::string_view isa) {
  std::string known;
  for (const Kernels* table : supported_kernels()) {
    if (table->isa == isa) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->isa);
  }
  fail(ErrorKind::kBadValue, "TRADEWIND_ISA: expected one of ", known, " on this processor, got '",
       isa, "'");
}

}  // namespace tradewind
