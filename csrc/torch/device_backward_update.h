// BackwardUpdate's counterpart on a device: parameters whose gradients have arrived share a step of
// the device's table, which is queued at once, and their gradients' memory is given back. A
// gradient that is not finite vetoes the parameters of its step. begin() and end() belong to the
// thread that runs the step, and nobody else uses the table in between; gradients arrive on
// autograd's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "torch/device_table.h"

namespace tradewind {

class DeviceBackwardUpdate {
 public:
  explicit DeviceBackwardUpdate(DeviceTable& table) : table_(table) {}

  // Every parameter that may get a gradient needs its state. `stream`: the one that backward runs
  // on. Throws as DeviceTable::prepare() does.
  void begin(std::vector<GroupOptions> groups, std::vector<at::Tensor> learning_rates,
             const DeviceOrders& orders, void* stream);
  [[nodiscard]] bool is_begun() const { return is_begun_; }
  // From the hook of a parameter. Throws Error(kBadState) naming one that arrives twice.
  void arrive(std::size_t idx);
  // Queues what still waits, and gradients whose hook never fired. The numbers of each step.
  std::vector<std::shared_ptr<StepReading>> end();

 private:
  void apply(std::vector<std::size_t> idx);

  DeviceTable& table_;
  std::vector<GroupOptions> groups_;
  std::vector<at::Tensor> learning_rates_;
  DeviceOrders orders_;
  void* stream_ = nullptr;
  bool is_begun_ = false;
  std::mutex mutex_;
  std::vector<std::uint8_t> has_arrived_;
  std::vector<std::size_t> waiting_;
  std::int64_t num_waiting_elements_ = 0;
  std::vector<std::shared_ptr<StepReading>> readings_;
};

}  // namespace tradewind
