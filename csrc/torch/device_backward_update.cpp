#include "torch/device_backward_update.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/backward_update.h"

namespace tradewind {

namespace {

// Elements that share a step: at 28 bytes each, as long in a GPU's memory as its launches take.
constexpr std::int64_t kWaitingElements = 4 * 1024 * 1024;

}  // namespace

void DeviceBackwardUpdate::begin(std::vector<GroupOptions> groups,
                                 std::vector<at::Tensor> learning_rates, const DeviceOrders& orders,
                                 void* stream) {
  table_.parameters().check_options(groups);
  groups_ = std::move(groups);
  learning_rates_ = std::move(learning_rates);
  orders_ = orders;
  stream_ = stream;
  has_arrived_.assign(table_.parameters().size(), 0);
  waiting_.clear();
  num_waiting_elements_ = 0;
  readings_.clear();
  is_begun_ = true;
}

void DeviceBackwardUpdate::arrive(std::size_t idx) {
  const std::scoped_lock lock(mutex_);
  if (!is_begun_) return;
  if (has_arrived_[idx] != 0) fail_twice(table_.parameters().entry(idx).name);
  has_arrived_[idx] = 1;
  waiting_.push_back(idx);
  num_waiting_elements_ += table_.parameters().tensors()[idx].numel();
  if (num_waiting_elements_ >= kWaitingElements) apply(std::exchange(waiting_, {}));
}

void DeviceBackwardUpdate::apply(std::vector<std::size_t> idx) {
  num_waiting_elements_ = 0;
  std::sort(idx.begin(), idx.end());
  OptimizerParameters& parameters = table_.parameters();
  const std::int64_t num_collected = parameters.collect_some(idx);
  if (num_collected == OptimizerParameters::kNoLongerFits) {
    fail(ErrorKind::kBadState, "a parameter's shape or strides changed during backward");
  }
  if (num_collected == 0) return;
  table_.prepare(groups_, learning_rates_, orders_);
  table_.measure(stream_);
  readings_.push_back(table_.update(stream_));
  for (const std::size_t i : idx) parameters.tensors()[i].mutable_grad().reset();
}

std::vector<std::shared_ptr<StepReading>> DeviceBackwardUpdate::end() {
  const std::scoped_lock lock(mutex_);
  apply(std::exchange(waiting_, {}));
  std::vector<std::size_t> rest;
  for (std::size_t idx = 0; idx < has_arrived_.size(); ++idx) {
    if (has_arrived_[idx] == 0) rest.push_back(idx);
  }
  apply(std::move(rest));
  is_begun_ = false;
  return std::exchange(readings_, {});
}

}  // namespace tradewind
