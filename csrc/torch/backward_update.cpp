#include "torch/backward_update.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "step/lanes.h"

namespace tradewind {

namespace {

// Gradients of so many elements share a sweep: 4 MiB of float32, of which a core's second-level
// cache and its share of the third still hold the most, and enough to be worth waking the threads
// for.
constexpr std::int64_t kWaitingElements = 1024 * 1024;

}  // namespace

void fail_twice(const std::string& parameter_name) {
  fail(ErrorKind::kBadState, "parameter '", parameter_name,
       "': its gradient arrived twice in one backward, and the first part is applied already; "
       "call torch.utils.checkpoint with use_reentrant=False, or use update='after-backward'");
}

void BackwardUpdate::begin(std::vector<GroupOptions> groups, bool wants_changes) {
  table_.parameters().check_options(groups);
  groups_ = std::move(groups);
  wants_changes_ = wants_changes;
  step_thread_ = std::this_thread::get_id();
  has_arrived_.assign(table_.parameters().size(), 0);
  waiting_.clear();
  num_waiting_elements_ = 0;
  statistics_.clear();
  result_ = {};
  is_begun_ = true;
}

void BackwardUpdate::arrive(std::size_t idx) {
  const std::scoped_lock lock(mutex_);
  if (!is_begun_) return;
  if (has_arrived_[idx] != 0) fail_twice(table_.parameters().entry(idx).name);
  has_arrived_[idx] = 1;
  waiting_.push_back(idx);
  num_waiting_elements_ += table_.parameters().tensors()[idx].numel();
  const bool is_step_thread = std::this_thread::get_id() == step_thread_;
  if (is_step_thread && num_waiting_elements_ >= kWaitingElements) flush();
}

void BackwardUpdate::flush() {
  apply(std::exchange(waiting_, {}));
  num_waiting_elements_ = 0;
}

void BackwardUpdate::apply(std::vector<std::size_t> idx) {
  std::sort(idx.begin(), idx.end());
  if (table_.collect_some(idx) == OptimizerParameters::kNoLongerFits) {
    fail(ErrorKind::kBadState, "a parameter's shape or strides changed during backward");
  }
  const Measure& measured = table_.measure();
  if (measured.num_nonfinite() > 0) {
    result_.num_nonfinite += measured.num_nonfinite();
    if (result_.first_nonfinite_name.empty()) {
      result_.first_nonfinite_name = table_.first_nonfinite_name();
    }
    std::vector<std::size_t> good;
    const auto& collected = table_.parameters().collected();
    for (std::size_t i = 0; i < collected.size(); ++i) {
      if (std::isfinite(measured.slots()[i].max_abs)) {
        good.push_back(collected[i].idx);
      } else {
        table_.parameters().tensors()[collected[i].idx].mutable_grad().reset();
        ++result_.num_withheld;
      }
    }
    (void)table_.collect_some(good);
    (void)table_.measure();
    idx = std::move(good);
  }
  result_.num_updated += static_cast<std::int64_t>(table_.parameters().collected().size());
  table_.sweep(groups_, 1.0, wants_changes_);
  statistics_.insert(statistics_.end(), table_.statistics().begin(), table_.statistics().end());
  for (const std::size_t i : idx) table_.parameters().tensors()[i].mutable_grad().reset();
}

BackwardUpdate::Result BackwardUpdate::end() {
  const std::scoped_lock lock(mutex_);
  flush();
  std::vector<std::size_t> rest;
  for (std::size_t idx = 0; idx < has_arrived_.size(); ++idx) {
    if (has_arrived_[idx] == 0) rest.push_back(idx);
  }
  apply(std::move(rest));
  is_begun_ = false;
  std::sort(statistics_.begin(), statistics_.end(),
            [](const auto& a, const auto& b) { return a.parameter_idx < b.parameter_idx; });
  // As Measure combines parameters, so that the norm has the same bits.
  const double squares =
      sum_in_lanes(static_cast<std::int64_t>(statistics_.size()), [&](std::int64_t i) {
        return statistics_[static_cast<std::size_t>(i)].measure.sum_of_squares;
      });
  result_.norm =
      result_.num_withheld > 0 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(squares);
  table_.set_statistics(std::move(statistics_));
  statistics_ = {};
  return result_;
}

}  // namespace tradewind
