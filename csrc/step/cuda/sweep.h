// The two halves of the sweep's kernels, one unit each so that they compile side by side.
#pragma once

#include "step/cuda/interface.h"

namespace tradewind::cuda {

int sweep_float(const TradewindCudaTable& table, const TradewindCudaList& list, int rule_idx,
                bool finishes, bool wants_changes, void* stream);
int sweep_double(const TradewindCudaTable& table, const TradewindCudaList& list, int rule_idx,
                 bool finishes, bool wants_changes, void* stream);

}  // namespace tradewind::cuda
