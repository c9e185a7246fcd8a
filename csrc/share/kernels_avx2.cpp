#define TRADEWIND_ISA_NAMESPACE isa_avx2
#define TRADEWIND_ISA_NAME "avx2"
#include "share/kernels_impl.h"
