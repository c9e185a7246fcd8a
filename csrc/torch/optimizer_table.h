// The native half of an optimizer on the CPU: which parameters it steps, their state in arenas, and
// one step over all of them. It holds the parameters (not their memory, which is theirs to change)
// and owns the state arenas; state tensors handed out keep their arena alive. One thread at a time:
// the one that runs forward and step.
//
// A step is collect() -> measure() (optional) -> add_state() for what missing_state() lists ->
// sweep(). Nothing of the model changes before sweep().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "step/sweep.h"
#include "torch/gradient_arena.h"
#include "torch/gradient_hooks.h"
#include "torch/group_state.h"
#include "torch/hot_measure.h"
#include "torch/orthogonalize.h"

namespace tradewind {

// What one param group sets for one step, in the order of its rule's option_names.
struct GroupOptions {
  std::vector<double> values;
  bool maximize = false;
  MatrixOptions matrix = {};  // for a rule that needs whole matrices
};

class BackwardUpdate;

class OptimizerTable {
 public:
  static constexpr std::int64_t kNoLongerFits = -1;

  explicit OptimizerTable(const StorageOptions& storage = {});
  ~OptimizerTable();
  OptimizerTable(const OptimizerTable&) = delete;
  OptimizerTable& operator=(const OptimizerTable&) = delete;

  // Adds a param group; group indices count from 0. Throws Error naming the parameter for one that
  // is not a strided CPU tensor of a floating or complex dtype, or that the storage does not fit.
  void add_group(std::string_view rule_name, const std::vector<at::Tensor>& parameters,
                 const std::vector<std::string>& names);

  // Takes up this step's gradients. Returns how many parameters have one, or kNoLongerFits where a
  // parameter's shape or strides are no longer those that its state was laid out for: make a new
  // table then. Throws naming the parameter for a gradient that is sparse, or of another dtype,
  // device or shape.
  std::int64_t collect();
  // The same for some parameters, in ascending order.
  std::int64_t collect_some(std::span<const std::size_t> parameter_idx);
  [[nodiscard]] const std::vector<std::size_t>& collected() const { return active_entries_; }
  // Measures what collect() took, from hot sums where they still hold.
  const Measure& measure();
  [[nodiscard]] std::int64_t num_hot() const { return num_hot_; }
  // The first parameter with a NaN or infinite gradient after measure(); empty if there is none.
  [[nodiscard]] std::string first_nonfinite_name() const;
  // Indices (over all groups, in order of addition) of collected parameters that have no state yet.
  [[nodiscard]] std::vector<std::int64_t> missing_state() const;
  // The same for all parameters that require a gradient.
  [[nodiscard]] std::vector<std::int64_t> missing_state_anywhere() const;

  // Gives a parameter its state, zero but for a master, which takes the parameter's value.
  // `is_first`: the next sweep is the rule's first for this parameter; false where the caller fills
  // the state from elsewhere.
  std::vector<NamedTensor> add_state(std::int64_t parameter_idx, bool is_first);
  // Sets a state from float values of the parameter's shape, in whatever way it is stored.
  void set_state(std::int64_t parameter_idx, std::int64_t state_idx, const at::Tensor& values);
  // Sets a master from float32 values, and the parameter to their rounding.
  void set_master(std::int64_t parameter_idx, const at::Tensor& values);
  // A master's values in float32, or a state's; undefined where there is no master.
  [[nodiscard]] at::Tensor master_values(std::int64_t parameter_idx) const;

  // Applies the rules to what collect() took. Throws before any change where a group's options are
  // NaN or too few.
  void sweep(const std::vector<GroupOptions>& groups, double gradient_multiplier,
             bool wants_changes = false);
  // In place of a sweep: the step is vetoed. statistics() then know the gradients alone.
  void skip();
  // What the last collect(), measure() and sweep() say of each parameter that had a gradient.
  struct ParameterStatistics {
    std::int64_t parameter_idx;
    std::int64_t num_elements;
    SlotMeasure measure;
    SlotChange change;
  };
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
  };
  void hook_gradients(OnGradient action);
  void install_hooks();
  void remove_hooks() noexcept;
  // Whether gradients are measured as they arrive: not in microbatches before the last.
  void set_hot(bool measures) { measures_hot_ = measures; }
  // Sums gradients whose hook did not fire.
  void sum_gradients();
  // Null unless hooked with kUpdate.
  [[nodiscard]] BackwardUpdate* backward_update() const { return backward_update_.get(); }

  [[nodiscard]] std::size_t num_parameters() const { return parameters_.size(); }
  [[nodiscard]] const at::Tensor& parameter(std::size_t idx) const { return parameters_[idx]; }
  [[nodiscard]] const std::string& name(std::size_t idx) const;
  // Throws where a group's options are NaN or too few.
  void check_options(const std::vector<GroupOptions>& groups) const;

 private:
  struct Group;
  struct Entry;

  void begin_collecting();
  void take_hot(std::size_t idx, const at::Tensor& parameter);
  void take_statistics(bool has_changes);
  void refresh_master(std::size_t idx);
  void check_overlap(std::vector<const void*> memory);
  [[nodiscard]] bool take_gradient(std::size_t idx);
  void make_scalars(const std::vector<GroupOptions>& groups);

  StorageOptions storage_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<at::Tensor> parameters_;
  std::vector<Entry> entries_;
  std::vector<SweepSlot> active_;
  std::vector<std::size_t> active_entries_;
  std::vector<at::Tensor> held_gradients_;
  struct WriteBack {
    at::Tensor parameter, dense;
  };
  std::vector<WriteBack> write_backs_;
  std::vector<const void*> checked_memory_;
  std::vector<ScalarBlock> scalars_;
  Measure measure_;
  Sweep sweep_;
  bool has_measure_ = false;
  std::vector<ParameterStatistics> statistics_;
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
