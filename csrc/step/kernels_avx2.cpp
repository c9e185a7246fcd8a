#define TRADEWIND_ISA_NAMESPACE isa_avx2
#define TRADEWIND_ISA_NAME "avx2"
#include "step/kernels_impl.h"
