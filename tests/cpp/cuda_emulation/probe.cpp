// The part of the library that asks the machine, for the emulated one: one device, of no
// capability.
#include "cuda_emulation/grid.h"
#include "step/cuda/interface.h"

extern "C" int tradewind_cuda_interface_version(void) { return TRADEWIND_CUDA_INTERFACE_VERSION; }

extern "C" int tradewind_cuda_probe(int* num_devices, int* compute_capability) {
  *num_devices = 1;
  *compute_capability = 0;
  return 0;
}

extern "C" const char* tradewind_cuda_error_text(int code) {
  if (code == 0) return "no error";
  return code == cuda_emulation::kLaunchFailure ? "the emulated launch failed" : "an error";
}
