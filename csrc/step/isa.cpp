#include "base/isa.h"

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

// By Isa.
constexpr const Kernels* kTables[] = {
    &isa_baseline::kKernels,
#if defined(__x86_64__)
    &isa_avx2::kKernels,
    &isa_avx512::kKernels,
#endif
};

const Kernels& table_of(Isa isa) { return *kTables[static_cast<int>(isa)]; }

}  // namespace

const Kernels& kernels() { return table_of(process_isa()); }

const Kernels& kernels_for(std::string_view isa) { return table_of(isa_named(isa)); }

}  // namespace tradewind
