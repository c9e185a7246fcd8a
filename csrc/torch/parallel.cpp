// The bridge unit: the only one compiled with -fopenmp, because at::parallel_for is a header
// template that is silently serial without it.
#include "torch/parallel.h"

#include <ATen/Parallel.h>

#ifndef INTRA_OP_PARALLEL
#error "compile this unit with -fopenmp: at::parallel_for would be serial"
#endif

namespace tradewind {

const Parallel kTorchParallel{
    [](std::int64_t total, std::int64_t grain, void* context, RangeBody body) {
      at::parallel_for(0, total, grain,
                       [&](std::int64_t begin, std::int64_t end) { body(context, begin, end); });
    }};

}  // namespace tradewind
