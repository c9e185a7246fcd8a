#define TRADEWIND_ISA_NAMESPACE isa_avx512
#define TRADEWIND_ISA_NAME "avx512"
#include "share/kernels_impl.h"
