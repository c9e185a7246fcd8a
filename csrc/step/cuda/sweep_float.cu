#include "step/cuda/place.cuh"
#include "step/cuda/sweep.cuh"
#include "step/cuda/sweep.h"

namespace tradewind::cuda {

int sweep_float(const TradewindCudaTable& table, const TradewindCudaList& list, int rule_idx,
                bool finishes, bool wants_changes, void* stream) {
  return launch_sweep_among<float>(AllRules{}, table, list, rule_idx, finishes, wants_changes,
                                   stream);
}

}  // namespace tradewind::cuda

extern "C" int tradewind_cuda_sweep(const TradewindCudaTable* table, const TradewindCudaList* list,
                                    int rule_idx, int is_double, int phase, int wants_changes,
                                    void* stream) {
  using namespace tradewind::cuda;
  const TradewindCudaList visited = list == nullptr ? whole_table(*table) : *list;
  const auto sweep = is_double != 0 ? &sweep_double : &sweep_float;
  return sweep(*table, visited, rule_idx, phase == TRADEWIND_CUDA_FINISH, wants_changes != 0,
               stream);
}
