#include "torch/device_image.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace tradewind {
namespace {

constexpr std::int64_t kAlignment = 256;

// Offsets of arrays that lie one after the other.
class Places {
 public:
  template <class T>
  std::int64_t add(std::int64_t count) {
    const std::int64_t place = (end_ + kAlignment - 1) / kAlignment * kAlignment;
    end_ = place + count * static_cast<std::int64_t>(sizeof(T));
    return place;
  }
  [[nodiscard]] std::int64_t end() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

// The run of bytes, in whole pages, outside of which both are alike; empty where all are.
struct Difference {
  std::size_t begin = 0, end = 0;
};

Difference find_difference(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  constexpr std::size_t kPageBytes = 512;
  Difference found;
  for (std::size_t begin = 0; begin < a.size(); begin += kPageBytes) {
    const std::size_t end = std::min(begin + kPageBytes, a.size());
    if (std::memcmp(a.data() + begin, b.data() + begin, end - begin) == 0) continue;
    if (found.end == 0) found.begin = begin;
    found.end = end;
  }
  return found;
}

}  // namespace

DeviceImage::DeviceImage(const Size& size, c10::Device device) : size_(size), pool_(device) {
  Places places;
  slots_ = places.add<TradewindCudaSlot>(size.num_slots);
  first_blocks_ = places.add<std::int64_t>(size.num_slots + 1);
  list_slots_ = places.add<std::int32_t>(size.num_slots);
  list_first_blocks_ = places.add<std::int64_t>(2 * size.num_slots);  // a list has a slot at least
  groups_ = places.add<TradewindCudaGroup>(size.num_groups);
  control_ = places.add<TradewindCudaControl>(1);
  static_assert(offsetof(TradewindCudaControl, settings) == 0);
  sent_bytes_ = control_ + static_cast<std::int64_t>(sizeof(TradewindCudaSettings));
  state_ = control_ + static_cast<std::int64_t>(offsetof(TradewindCudaControl, state));
  outcome_ = control_ + static_cast<std::int64_t>(offsetof(TradewindCudaControl, outcome));
  slot_measures_ = places.add<TradewindCudaMeasure>(size.num_slots);
  slot_changes_ = places.add<TradewindCudaChange>(size.num_slots);
  kept_end_ = places.end();
  plans_ = places.add<TradewindCudaPlan>(size.num_slots);
  block_measures_ = places.add<TradewindCudaMeasure>(size.num_blocks);
  block_changes_ = places.add<TradewindCudaChange>(size.num_blocks);
  num_bytes_ = places.end();
  next_.resize(static_cast<std::size_t>(sent_bytes_));
  sent_.resize(next_.size());
  bytes_ = at::zeros({num_bytes_}, at::TensorOptions().dtype(at::kByte).device(device));
}

template <class T>
std::span<T> DeviceImage::host(std::int64_t offset, std::int64_t count) {
  // SAFETY: the vector's memory is aligned for any scalar, and each offset to kAlignment.
  return {reinterpret_cast<T*>(next_.data() + offset), static_cast<std::size_t>(count)};
}

template <class T>
T* DeviceImage::device(std::int64_t offset) const {
  return reinterpret_cast<T*>(static_cast<std::byte*>(bytes_.mutable_data_ptr()) + offset);
}

std::span<TradewindCudaSlot> DeviceImage::slots() {
  return host<TradewindCudaSlot>(slots_, size_.num_slots);
}
std::span<std::int64_t> DeviceImage::first_blocks() {
  return host<std::int64_t>(first_blocks_, size_.num_slots + 1);
}
std::span<TradewindCudaGroup> DeviceImage::groups() {
  return host<TradewindCudaGroup>(groups_, size_.num_groups);
}
TradewindCudaSettings& DeviceImage::settings() {
  return host<TradewindCudaSettings>(control_, 1).front();
}
std::span<std::int32_t> DeviceImage::list_slots() {
  return host<std::int32_t>(list_slots_, size_.num_slots);
}
std::span<std::int64_t> DeviceImage::list_first_blocks() {
  return host<std::int64_t>(list_first_blocks_, 2 * size_.num_slots);
}

void DeviceImage::upload(bool is_capturing) {
  Difference difference{0, next_.size()};
  if (is_sent_ && !is_capturing && !has_captured_) difference = find_difference(next_, sent_);
  const std::size_t num_bytes = difference.end - difference.begin;
  if (num_bytes == 0) return;
  std::shared_ptr<PinnedBuffer> buffer;
  if (is_capturing) {
    if (!for_capture_) {
      fail(ErrorKind::kBadState,
           "step in a capture: expected a step outside of it before, found none since the last "
           "capture; take one, so that memory for the capture is there");
    }
    buffer = captured_.emplace_back(std::move(for_capture_));
    has_captured_ = true;
  } else {
    buffer = pool_.take(sent_bytes_);
    if (!for_capture_) for_capture_ = pool_.take(sent_bytes_);
  }
  std::memcpy(buffer->data(), next_.data() + difference.begin, num_bytes);
  buffer->copy_to(bytes_.narrow(0, static_cast<std::int64_t>(difference.begin),
                                static_cast<std::int64_t>(num_bytes)));
  if (!is_capturing) buffer->mark();
  sent_ = next_;
  is_sent_ = true;
  ++num_uploads_;
}

TradewindCudaTable DeviceImage::table(std::int64_t num_slots) const {
  TradewindCudaTable table{};
  table.slots = device<TradewindCudaSlot>(slots_);
  table.first_blocks = device<std::int64_t>(first_blocks_);
  table.groups = device<TradewindCudaGroup>(groups_);
  table.control = device<TradewindCudaControl>(control_);
  table.block_measures = device<TradewindCudaMeasure>(block_measures_);
  table.slot_measures = device<TradewindCudaMeasure>(slot_measures_);
  table.plans = device<TradewindCudaPlan>(plans_);
  table.block_changes = device<TradewindCudaChange>(block_changes_);
  table.slot_changes = device<TradewindCudaChange>(slot_changes_);
  const auto* first_blocks = reinterpret_cast<const std::int64_t*>(next_.data() + first_blocks_);
  table.num_blocks = first_blocks[num_slots];
  table.num_slots = static_cast<std::int32_t>(num_slots);
  return table;
}

TradewindCudaList DeviceImage::list(std::int64_t slot_place, std::int64_t block_place,
                                    std::int64_t num_slots) const {
  const auto* blocks = reinterpret_cast<const std::int64_t*>(next_.data() + list_first_blocks_);
  return {device<std::int32_t>(list_slots_) + slot_place,
          device<std::int64_t>(list_first_blocks_) + block_place, blocks[block_place + num_slots],
          static_cast<std::int32_t>(num_slots)};
}

at::Tensor DeviceImage::kept() const { return bytes_.narrow(0, state_, kept_end_ - state_); }

at::Tensor DeviceImage::scalar(std::int64_t offset, at::ScalarType dtype,
                               std::int64_t count) const {
  const auto num_bytes = count * static_cast<std::int64_t>(c10::elementSize(dtype));
  return bytes_.narrow(0, state_ + offset, num_bytes).view(dtype);
}

}  // namespace tradewind
