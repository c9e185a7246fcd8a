#include "torch/step_reading.h"

#include <cstring>

namespace tradewind {
namespace {

template <class T>
T read(const PinnedBuffer& buffer, std::int64_t offset, std::size_t idx = 0) {
  T value;
  std::memcpy(&value, buffer.data() + offset + idx * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

TradewindCudaOutcome StepReading::outcome() const {
  buffer_->wait();
  return read<TradewindCudaOutcome>(*buffer_, places_.outcome);
}

std::vector<ParameterStatistics> StepReading::statistics() const {
  const bool has_moved = outcome().vetoed == 0;  // which waits
  std::vector<ParameterStatistics> all;
  all.reserve(slots_->size());
  for (std::size_t i = 0; i < slots_->size(); ++i) {
    ParameterStatistics one{(*slots_)[i].parameter_idx, (*slots_)[i].num_elements, {}, {}};
    if (places_.measures) {
      const auto measure = read<TradewindCudaMeasure>(*buffer_, *places_.measures, i);
      one.measure = {measure.sum_of_squares, measure.max_abs, measure.num_zeros};
    }
    if (places_.changes && has_moved) {
      const auto change = read<TradewindCudaChange>(*buffer_, *places_.changes, i);
      one.change = {change.parameter_squares, change.change_squares};
    }
    all.push_back(one);
  }
  return all;
}

std::int64_t StepReading::first_nonfinite_parameter() const {
  const std::int64_t slot = outcome().first_nonfinite_slot;
  return slot < 0 ? -1 : (*slots_)[static_cast<std::size_t>(slot)].parameter_idx;
}

}  // namespace tradewind
