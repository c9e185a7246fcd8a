// Stands in for libtradewind_cuda: the same C interfaces, no CUDA behind them.
#include "share/cuda/interface.h"
#include "step/cuda/interface.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int tradewind_cuda_interface_version(void) {
#ifdef FAKE_CUDA_OTHER_VERSION
  return TRADEWIND_CUDA_INTERFACE_VERSION + 1;
#else
  return TRADEWIND_CUDA_INTERFACE_VERSION;
#endif
}

EXPORTED int tradewind_cuda_share_version(void) {
#ifdef FAKE_CUDA_OTHER_VERSION
  return TRADEWIND_CUDA_SHARE_VERSION + 1;
#else
  return TRADEWIND_CUDA_SHARE_VERSION;
#endif
}

EXPORTED const char* tradewind_cuda_error_text(int) { return "the text of an error"; }

EXPORTED int tradewind_cuda_probe(int* num_devices, int* compute_capability) {
  *num_devices = 2;
  *compute_capability = 90;
  return 0;
}

EXPORTED int tradewind_cuda_ingest(const TradewindCudaTable*, const TradewindCudaList*,
                                   const TradewindCudaSource*, int, int, void*) {
  return 0;
}

EXPORTED int tradewind_cuda_measure(const TradewindCudaTable*, const TradewindCudaList*, void*) {
  return 0;
}

EXPORTED int tradewind_cuda_combine(const TradewindCudaTable*, void*) { return 0; }

EXPORTED int tradewind_cuda_control(const TradewindCudaTable*, void*) { return 0; }

EXPORTED int tradewind_cuda_sweep(const TradewindCudaTable*, const TradewindCudaList*, int, int,
                                  int, int, void*) {
  return 0;
}

EXPORTED int tradewind_cuda_combine_changes(const TradewindCudaTable*, const TradewindCudaList*,
                                            void*) {
  return 0;
}

EXPORTED int tradewind_cuda_encode(const TradewindCudaRun*, const void*, float*, void*, void*) {
  return 0;
}

EXPORTED int tradewind_cuda_decode(const TradewindCudaRun*, const void*, void*, void*) { return 0; }

EXPORTED int tradewind_cuda_sum(const TradewindCudaRun*, const TradewindCudaPart*, int64_t, double,
                                void*, void*) {
  return 0;
}
