#include "base/isa.h"

#include "share/kernels.h"

namespace tradewind {

namespace isa_baseline {
extern const ShareKernels kShareKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const ShareKernels kShareKernels;
}
namespace isa_avx512 {
extern const ShareKernels kShareKernels;
}
#endif

namespace {

// By Isa.
constexpr const ShareKernels* kTables[] = {
    &isa_baseline::kShareKernels,
#if defined(__x86_64__)
    &isa_avx2::kShareKernels,
    &isa_avx512::kShareKernels,
#endif
};

const ShareKernels& table_of(Isa isa) { return *kTables[static_cast<int>(isa)]; }

}  // namespace

const ShareKernels& share_kernels() { return table_of(process_isa()); }

const ShareKernels& share_kernels_for(std::string_view isa) { return table_of(isa_named(isa)); }

}  // namespace tradewind
