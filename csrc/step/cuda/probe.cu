#include <cuda_runtime.h>

#include "step/cuda/interface.h"

extern "C" int tradewind_cuda_interface_version(void) { return TRADEWIND_CUDA_INTERFACE_VERSION; }

extern "C" int tradewind_cuda_probe(int* num_devices, int* compute_capability) {
  *num_devices = 0;
  *compute_capability = 0;
  const cudaError_t counted = cudaGetDeviceCount(num_devices);
  if (counted != cudaSuccess || *num_devices == 0) return counted;
  int major = 0;
  int minor = 0;
  cudaError_t asked = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (asked == cudaSuccess) {
    asked = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  }
  *compute_capability = 10 * major + minor;
  return asked;
}

extern "C" const char* tradewind_cuda_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
