// The numbers of one step on a device, on their way to the host: copied behind the step, and waited
// for by nobody who does not ask. In a graph's capture they are those of the last replay that the
// device has finished. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "step/cuda/interface.h"
#include "torch/optimizer_parameters.h"
#include "torch/pinned_pool.h"

namespace tradewind {

class StepReading {
 public:
  struct Slot {
    std::int64_t parameter_idx;
    std::int64_t num_elements;

    bool operator==(const Slot&) const = default;
  };
  // Where the numbers lie in the buffer; nothing where they were not asked for.
  struct Places {
    std::int64_t outcome = 0;
    std::optional<std::int64_t> measures, changes;
  };

  StepReading(std::shared_ptr<PinnedBuffer> buffer, Places places, bool is_captured,
              std::shared_ptr<const std::vector<Slot>> slots)
      : buffer_(std::move(buffer)),
        places_(places),
        is_captured_(is_captured),
        slots_(std::move(slots)) {}

  // Whether every replay of a graph writes the numbers anew. The host must then wait for the replay
  // itself.
  [[nodiscard]] bool is_captured() const { return is_captured_; }

  // Whether the device has come so far.
  [[nodiscard]] bool is_ready() const { return buffer_->is_over(); }
  // These wait for the device.
  [[nodiscard]] TradewindCudaOutcome outcome() const;
  [[nodiscard]] std::vector<ParameterStatistics> statistics() const;
  // The first parameter with a NaN or infinite gradient; -1: none.
  [[nodiscard]] std::int64_t first_nonfinite_parameter() const;

 private:
  std::shared_ptr<PinnedBuffer> buffer_;
  Places places_;
  bool is_captured_;
  std::shared_ptr<const std::vector<Slot>> slots_;  // in the order of the step
};

}  // namespace tradewind
