#include "step/cuda/sweep.cuh"
#include "step/cuda/sweep.h"

namespace tradewind::cuda {

int sweep_double(const TradewindCudaTable& table, const TradewindCudaList& list, int rule_idx,
                 bool finishes, bool wants_changes, void* stream) {
  return launch_sweep_among<double>(AllRules{}, table, list, rule_idx, finishes, wants_changes,
                                    stream);
}

}  // namespace tradewind::cuda
