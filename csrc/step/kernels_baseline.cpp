#define TRADEWIND_ISA_NAMESPACE isa_baseline
#define TRADEWIND_ISA_NAME "baseline"
#include "step/kernels_impl.h"
