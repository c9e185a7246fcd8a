// Stands in for libtradewind_cuda: the same C interface, no CUDA behind it.
#include "step/cuda/interface.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int tradewind_cuda_interface_version(void) {
#ifdef FAKE_CUDA_OTHER_VERSION
  return TRADEWIND_CUDA_INTERFACE_VERSION + 1;
#else
  return TRADEWIND_CUDA_INTERFACE_VERSION;
#endif
}

EXPORTED int tradewind_cuda_probe(int* num_devices, int* compute_capability) {
  *num_devices = 2;
  *compute_capability = 90;
  return 0;
}

EXPORTED int tradewind_cuda_adamw(const TradewindCudaTensor*, int, const void*, int, float,
                                  const float*, void*) {
  return 0;
}

EXPORTED const char* tradewind_cuda_error_text(int) { return "the text of an error"; }
