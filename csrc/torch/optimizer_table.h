// The native half of an optimizer on the CPU: its parameters with their state in arenas, and one
// step over all of them. One thread at a time: the one that runs forward and step.
//
// A step is collect() -> measure() (optional) -> add_state() for what missing_state() lists ->
// sweep(). Nothing of the model changes before sweep().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "step/sweep.h"
#include "torch/hot_measure.h"
#include "torch/optimizer_parameters.h"

namespace tradewind {

class OptimizerTable {
 public:
  explicit OptimizerTable(const StorageOptions& storage = {})
      : parameters_(storage, c10::Device(c10::DeviceType::CPU)) {}
  OptimizerTable(const OptimizerTable&) = delete;
  OptimizerTable& operator=(const OptimizerTable&) = delete;

  void add_group(std::string_view rule_name, const std::vector<at::Tensor>& parameters,
                 const std::vector<std::string>& names);
  [[nodiscard]] OptimizerParameters& parameters() { return parameters_; }

  // OptimizerParameters::collect().
  std::int64_t collect();
  // Measures what collect() took, from hot sums where they still hold.
  const Measure& measure();
  [[nodiscard]] std::int64_t num_hot() const { return num_hot_; }
  // The first parameter with a NaN or infinite gradient after measure(); empty if there is none.
  [[nodiscard]] std::string first_nonfinite_name() const;

  // Applies the rules to what collect() took. Throws before any change where a group's options are
  // NaN or too few.
  void sweep(const std::vector<GroupOptions>& groups, double gradient_multiplier,
             bool wants_changes = false);
  // What the last collect(), measure() and sweep() say of each parameter that had a gradient.
  struct ParameterStatistics {
    std::int64_t parameter_idx;
    std::int64_t num_elements;
    SlotMeasure measure;
    SlotChange change;
  };
  [[nodiscard]] const std::vector<ParameterStatistics>& statistics() const { return statistics_; }
  // Drops every gradient, as zero_grad(set_to_none=True) does.
  void release_gradients();

  void enable_hot_measure();
  [[nodiscard]] HotMeasure* hot_measure() const { return hot_measure_.get(); }

 private:
  void take_statistics(bool has_changes);
  void make_scalars(const std::vector<GroupOptions>& groups);

  OptimizerParameters parameters_;
  std::vector<SweepSlot> slots_;  // of what collect() took
  std::vector<ScalarBlock> scalars_;
  Measure measure_;
  Sweep sweep_;
  bool has_measure_ = false;
  std::vector<ParameterStatistics> statistics_;
  std::int64_t num_hot_ = 0;
  std::unique_ptr<HotMeasure> hot_measure_;
};

}  // namespace tradewind
