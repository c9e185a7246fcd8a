#define TRADEWIND_ISA_NAMESPACE isa_baseline
#define TRADEWIND_ISA_NAME "baseline"
#include "share/kernels_impl.h"
