// The update inside backward: each parameter is stepped as soon as its gradient exists and the
// gradient freed, so that gradients never all live at once. Small ones wait for each other, up to a
// bound, and share a sweep. A gradient that is not finite vetoes its own parameter's update alone.
// begin(), end() and the sweeps belong to the thread that runs the step; gradients that arrive on
// another thread wait for end().
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "torch/optimizer_table.h"

namespace tradewind {

// Throws Error(kBadState): its gradient came in pieces, and the first is applied already.
[[noreturn]] void fail_twice(const std::string& parameter_name);

class BackwardUpdate {
 public:
  struct Result {
    double norm = 0.0;  // of all gradients, the withheld ones too
    std::int64_t num_updated = 0;
    std::int64_t num_withheld = 0;
    std::int64_t num_nonfinite = 0;  // elements
    std::string first_nonfinite_name;
  };

  explicit BackwardUpdate(OptimizerTable& table) : table_(table) {}

  // Starts a step: from now on gradients are applied as they arrive. Every parameter that may get
  // one needs its state. Throws, before any change, where the options cannot be used.
  void begin(std::vector<GroupOptions> groups, bool wants_changes);
  [[nodiscard]] bool is_begun() const { return is_begun_; }
  // From the hook of a parameter. Throws Error(kBadState) naming one that arrives twice.
  void arrive(std::size_t idx);
  // Applies what still waits, and gradients whose hook never fired. The table's statistics() are
  // then those of the whole step.
  Result end();

 private:
  void flush();
  void apply(std::vector<std::size_t> idx);

  OptimizerTable& table_;
  std::vector<GroupOptions> groups_;
  bool wants_changes_ = false;
  bool is_begun_ = false;
  std::thread::id step_thread_;
  std::mutex mutex_;
  std::vector<std::uint8_t> has_arrived_;
  std::vector<std::size_t> waiting_;
  std::int64_t num_waiting_elements_ = 0;
  std::vector<ParameterStatistics> statistics_;
  Result result_;
};

}  // namespace tradewind
