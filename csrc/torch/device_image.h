// The arrays of a step as libtradewind_cuda sees them, in one piece of device memory: first what
// the host says (slots, lists, groups, orders), of which the host keeps the same bytes and sends
// only those that changed; then what the device keeps and works out. Room is for all parameters, so
// that nothing moves when fewer of them have a gradient. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "step/cuda/interface.h"
#include "torch/pinned_pool.h"

namespace tradewind {

class DeviceImage {
 public:
  struct Size {
    std::int64_t num_slots = 0;
    std::int64_t num_blocks = 0;
    std::int64_t num_groups = 0;
  };

  DeviceImage(const Size& size, c10::Device device);

  // The host's side, to be filled before upload().
  [[nodiscard]] std::span<TradewindCudaSlot> slots();
  [[nodiscard]] std::span<std::int64_t> first_blocks();  // one more than slots
  [[nodiscard]] std::span<TradewindCudaGroup> groups();
  [[nodiscard]] TradewindCudaSettings& settings();
  // All lists, one after the other: slots in each, and first blocks, of which each list has one
  // more.
  [[nodiscard]] std::span<std::int32_t> list_slots();
  [[nodiscard]] std::span<std::int64_t> list_first_blocks();

  // Sends what changed since the last call, in one copy on the current stream; nothing where
  // nothing changed. In a capture all is sent, from memory that stays as it is: a replay then sends
  // the same again, whatever was sent in between.
  void upload(bool is_capturing);
  [[nodiscard]] std::int64_t num_uploads() const { return num_uploads_; }

  // The device's side, where a step goes over so many slots.
  [[nodiscard]] TradewindCudaTable table(std::int64_t num_slots) const;
  // A list whose slots and first blocks begin at these places of list_slots() and
  // list_first_blocks().
  [[nodiscard]] TradewindCudaList list(std::int64_t slot_place, std::int64_t block_place,
                                       std::int64_t num_slots) const;

  // Where in kept() the numbers of a step lie.
  [[nodiscard]] std::int64_t outcome_offset() const { return outcome_ - state_; }
  [[nodiscard]] std::int64_t measures_offset() const { return slot_measures_ - state_; }
  [[nodiscard]] std::int64_t changes_offset() const { return slot_changes_ - state_; }
  // State, outcome, slot measures and slot changes, one after the other, as bytes on the device.
  [[nodiscard]] at::Tensor kept() const;
  // A scalar of the device's memory, `offset` bytes after the state's begin.
  [[nodiscard]] at::Tensor scalar(std::int64_t offset, at::ScalarType dtype,
                                  std::int64_t count) const;
  [[nodiscard]] const Size& size() const { return size_; }

 private:
  template <class T>
  [[nodiscard]] std::span<T> host(std::int64_t offset, std::int64_t count);
  template <class T>
  [[nodiscard]] T* device(std::int64_t offset) const;

  Size size_;
  std::int64_t slots_ = 0, first_blocks_ = 0, list_slots_ = 0, list_first_blocks_ = 0, groups_ = 0;
  std::int64_t control_ = 0, sent_bytes_ = 0, state_ = 0, outcome_ = 0;
  std::int64_t slot_measures_ = 0, slot_changes_ = 0, kept_end_ = 0;
  std::int64_t plans_ = 0, block_measures_ = 0, block_changes_ = 0, num_bytes_ = 0;

  std::vector<std::byte> next_, sent_;  // the host's side, and what the device has of it
  bool is_sent_ = false;
  bool has_captured_ = false;
  std::int64_t num_uploads_ = 0;
  PinnedPool pool_;
  std::vector<std::shared_ptr<PinnedBuffer>> captured_;  // read by graphs at every replay
  std::shared_ptr<PinnedBuffer> for_capture_;            // as a capture may not allocate
  at::Tensor bytes_;                                     // on the device
};

}  // namespace tradewind
