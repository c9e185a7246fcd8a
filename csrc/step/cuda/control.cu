// What a step decides before it touches a parameter, on the device so that no host waits for it:
// norm, veto, clip factor, loss scale; then, by slot, the step count and the rule's scalars.
#include "step/cuda/place.cuh"
#include "step/cuda/warp.cuh"
#include "step/format.h"
#include "step/rules/all.h"

namespace tradewind::cuda {
namespace {

constexpr int kThreads = 128;

// torch.amp.GradScaler's update, with a floor. Factors multiply in float64 and round once, as its
// kernel does.
__device__ void update_loss_scale(const TradewindCudaSettings& settings, bool is_finite,
                                  TradewindCudaState& state) {
  const auto scale = static_cast<double>(state.loss_scale);
  if (!is_finite) {
    const double lower = scale * settings.backoff_factor;
    const bool is_below = lower < settings.min_loss_scale;
    state.loss_scale = static_cast<float>(is_below ? settings.min_loss_scale : lower);
    state.growth_tracker = 0;
    return;
  }
  if (++state.growth_tracker != settings.growth_interval) return;
  const auto higher = static_cast<float>(scale * settings.growth_factor);
  if (cuda::is_finite(static_cast<double>(higher))) state.loss_scale = higher;
  state.growth_tracker = 0;
}

// One thread: a few dozen operations on what is already summed.
__global__ void decide_kernel(TradewindCudaControl* control) {
  if (threadIdx.x != 0) return;
  const TradewindCudaSettings& settings = control->settings;
  TradewindCudaState& state = control->state;
  TradewindCudaOutcome& outcome = control->outcome;
  const bool keeps_scale = settings.growth_interval > 0;
  const float own_scale = keeps_scale ? state.loss_scale : 1.0F;
  const float given_scale = settings.grad_scale == nullptr ? 1.0F : *settings.grad_scale;
  const double loss_scale = static_cast<double>(own_scale) * static_cast<double>(given_scale);
  const double unscale = settings.gradient_multiplier / loss_scale;
  const bool is_measured = settings.is_measured != 0;
  const bool is_finite = !is_measured || outcome.num_nonfinite_slots == 0.0;
  const bool is_vetoed = settings.found_inf != nullptr && *settings.found_inf != 0.0F;
  const double size = unscale < 0.0 ? -unscale : unscale;
  const double norm = is_measured ? root(outcome.sum_of_squares) * size : 0.0;
  double clip_factor = 1.0;
  if (is_measured && settings.max_norm >= 0.0) {
    const double factor = settings.max_norm / (norm + 1e-6);
    clip_factor = factor > 1.0 ? 1.0 : factor;
  }
  outcome.norm = norm;
  outcome.clip_factor = clip_factor;
  outcome.gradient_multiplier = unscale * clip_factor;
  outcome.loss_scale = static_cast<float>(loss_scale);
  const bool vetoes = is_vetoed || (settings.vetoes_nonfinite != 0 && !is_finite);
  outcome.vetoed = vetoes ? 1 : 0;
  state.num_steps += vetoes ? 0 : 1;
  state.num_skipped += vetoes ? 1 : 0;
  if (keeps_scale) update_loss_scale(settings, is_finite && !is_vetoed, state);
}

template <class Rule, class T>
__device__ __forceinline__ void write_scalars(const double* options, std::int64_t step,
                                              bool is_first, unsigned char* out) {
  using Scalars = typename Rule::template Scalars<T>;
  static_assert(sizeof(Scalars) <= TRADEWIND_CUDA_SCALAR_BYTES);
  static_assert(sizeof(typename Rule::Options) <= TRADEWIND_CUDA_MAX_OPTIONS * sizeof(double));
  static_assert(Rule::kOptionNames[0][0] == 'l' && Rule::kOptionNames[0][1] == 'r' &&
                    Rule::kOptionNames[0][2] == '\0',
                "lr comes first: TradewindCudaGroup.lr replaces the first option");
  typename Rule::Options typed;
  memcpy(&typed, options, sizeof(typed));
  const Scalars scalars = Rule::template scalars<T>(typed, step, is_first);
  memcpy(out, &scalars, sizeof(scalars));
}

template <class T, class... Rules>
__device__ void write_scalars_among(RuleList<Rules...>, int rule_idx, const double* options,
                                    std::int64_t step, bool is_first, unsigned char* out) {
  int idx = 0;
  ((idx++ == rule_idx ? write_scalars<Rules, T>(options, step, is_first, out) : void()), ...);
}

// One thread for each slot.
__global__ void __launch_bounds__(kThreads) plan_kernel(TradewindCudaTable table) {
  const TradewindCudaControl& control = *table.control;
  const std::int64_t slot_idx = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (slot_idx >= table.num_slots || control.outcome.vetoed != 0) return;
  const TradewindCudaSlot& slot = table.slots[slot_idx];
  const TradewindCudaGroup& group = table.groups[slot.group_idx];
  double options[TRADEWIND_CUDA_MAX_OPTIONS];
  for (int i = 0; i < TRADEWIND_CUDA_MAX_OPTIONS; ++i) options[i] = group.options[i];
  if (group.lr != nullptr) {
    options[0] = group.lr_is_double != 0
                     ? *static_cast<const double*>(group.lr)
                     : static_cast<double>(*static_cast<const float*>(group.lr));
  }
  std::int64_t step = 1;  // where none is counted
  if (slot.step != nullptr) {
    const float before = *slot.step;
    *slot.step = before + 1.0F;
    step = static_cast<std::int64_t>(before) + 1;
  }
  bool is_first = false;
  if (slot.has_stepped != nullptr) {
    is_first = *slot.has_stepped == 0;
    *slot.has_stepped = 1;
  }
  TradewindCudaPlan& plan = table.plans[slot_idx];
  if (static_cast<Format>(slot.parameter_format) == Format::kFloat64) {
    write_scalars_among<double>(AllRules{}, slot.rule_idx, options, step, is_first, plan.scalars);
  } else {
    write_scalars_among<float>(AllRules{}, slot.rule_idx, options, step, is_first, plan.scalars);
  }
  plan.gradient_multiplier = control.outcome.gradient_multiplier * slot.sign;
  plan.random_key = random_key(control.settings.seed, step, slot.parameter_idx);
}

}  // namespace
}  // namespace tradewind::cuda

extern "C" int tradewind_cuda_control(const TradewindCudaTable* table, void* stream) {
  using namespace tradewind::cuda;
  const int code = launch(decide_kernel, 1, kWarpThreads, 0, stream, table->control);
  if (code != cudaSuccess) return code;
  const std::int64_t num_blocks = (std::int64_t{table->num_slots} + kThreads - 1) / kThreads;
  return launch(plan_kernel, num_blocks, kThreads, 0, stream, *table);
}
