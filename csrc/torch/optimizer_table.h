// The native half of an optimizer on the CPU: its parameters with their state in arenas, and one
// step over all of them. One thread at a time: the one that runs forward and step.
//
// A step is collect() -> measure() (optional) -> add_state() for what missing_state() lists ->
// sweep(). Nothing of the model changes before sweep().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "step/sweep.h"
#include "torch/gradient_arena.h"
#include "torch/gradient_hooks.h"
#include "torch/hot_measure.h"
#include "torch/optimizer_parameters.h"

namespace tradewind {

class BackwardUpdate;

// What a step's gradients are like, as they lie in memory.
struct MeasureResult {
  double norm = 0.0;
  std::int64_t num_nonfinite = 0;  // elements
  std::string first_nonfinite_name;
  std::int64_t num_hot = 0;
};

class OptimizerTable {
 public:
  explicit OptimizerTable(const StorageOptions& storage = {});
  ~OptimizerTable();
  OptimizerTable(const OptimizerTable&) = delete;
  OptimizerTable& operator=(const OptimizerTable&) = delete;

  void add_group(std::string_view rule_name, const std::vector<at::Tensor>& parameters,
                 const std::vector<std::string>& names);
  [[nodiscard]] OptimizerParameters& parameters() { return parameters_; }
  std::vector<NamedTensor> add_state(std::int64_t parameter_idx, bool is_first) {
    return parameters_.add_state(parameter_idx, is_first);
  }

  // As OptimizerParameters has them.
  std::int64_t collect();
  std::int64_t collect_some(std::span<const std::size_t> parameter_idx);
  // Measures what collect() took, from hot sums where they still hold.
  const Measure& measure();
  [[nodiscard]] MeasureResult measure_result() const;
  // The first parameter with a NaN or infinite gradient after measure(); empty if there is none.
  [[nodiscard]] std::string first_nonfinite_name() const;

  // Applies the rules to what collect() took. Throws before any change where a group's options are
  // NaN or too few.
  void sweep(const std::vector<GroupOptions>& groups, double gradient_multiplier,
             bool wants_changes = false);
  // A step in parts, in place of collect() to sweep(): each part's parameters are swept once their
  // gradients are there, which stay until end_parts(). The measure and statistics() are then those
  // of the whole step.
  void sweep_part(std::span<const std::size_t> parameter_idx,
                  const std::vector<GroupOptions>& groups, double gradient_multiplier,
                  bool wants_changes);
  MeasureResult end_parts();
  // Forgets what parts said.
  void drop_parts() { parts_.clear(); }
  // What a sweep may use from now on; another thread than the step's must not use torch's pool.
  void set_parallel(const Parallel& parallel) { parallel_ = parallel; }
  // In place of a sweep: the step is vetoed. statistics() then know the gradients alone.
  void skip();
  // What the last collect(), measure() and sweep() say of each parameter that had a gradient.
  [[nodiscard]] const std::vector<ParameterStatistics>& statistics() const { return statistics_; }
  void set_statistics(std::vector<ParameterStatistics> statistics) {
    statistics_ = std::move(statistics);
  }
  // Drops every gradient, as zero_grad(set_to_none=True) does.
  void release_gradients();

  // --- backward ---
  // What hooks do with a gradient as soon as it is there.
  enum class OnGradient : std::uint8_t {
    kMeasure,  // while it is hot in cache
    kSum,      // 16-bit ones into float32 sums, the others as kMeasure
    kUpdate,   // the step itself, between backward_update().begin() and end()
    kShared,   // nothing: whoever shares gradients gives their measures to hot_measure()
  };
  void hook_gradients(OnGradient action);
  void install_hooks();
  void remove_hooks() noexcept;
  // Whether gradients are measured as they arrive: not in microbatches before the last.
  void set_hot(bool measures) { measures_hot_ = measures; }
  // Sums gradients whose hook did not fire.
  void sum_gradients();
  // Throws unless hooked.
  [[nodiscard]] HotMeasure& hot_measure() const;
  // Null unless hooked with kUpdate.
  [[nodiscard]] BackwardUpdate* backward_update() const { return backward_update_.get(); }

 private:
  void bind_slots();
  void take_hot(std::size_t idx, const at::Tensor& parameter);
  void take_statistics(bool has_changes);
  void make_scalars(const std::vector<GroupOptions>& groups);

  OptimizerParameters parameters_;
  Parallel parallel_;
  std::vector<SweepSlot> slots_;  // of what collect() took
  std::vector<ScalarBlock> scalars_;
  Measure measure_;
  Sweep sweep_;
  bool has_measure_ = false;
  std::vector<ParameterStatistics> statistics_;
  std::vector<ParameterStatistics> parts_;
  std::int64_t num_hot_ = 0;
  OnGradient on_gradient_ = OnGradient::kMeasure;
  bool measures_hot_ = true;
  std::unique_ptr<HotMeasure> hot_measure_;
  std::unique_ptr<GradientArena> gradient_arena_;
  std::unique_ptr<BackwardUpdate> backward_update_;
  // Last, so that no hook finds the rest gone.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace tradewind
