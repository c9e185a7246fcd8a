// Host memory that a device copies from or to while the host goes on: a buffer is given out again
// only when its last copy is over, which is asked and never waited for. On the CPU, where copies
// are over when they return, it is plain memory. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tradewind {

class PinnedBuffer {
 public:
  PinnedBuffer(std::int64_t num_bytes, c10::Device device);

  [[nodiscard]] std::byte* data() const {
    return static_cast<std::byte*>(bytes_.mutable_data_ptr());
  }
  [[nodiscard]] std::int64_t size_bytes() const { return bytes_.numel(); }
  // Queue a copy of `there`'s bytes on the device's current stream.
  void copy_to(const at::Tensor& there);
  void copy_from(const at::Tensor& there);
  // Marks the place in the current stream that is_over() and wait() speak of. Not in a capture.
  void mark();
  [[nodiscard]] bool is_over() const;
  void wait() const;

 private:
  c10::Device device_;
  at::Tensor bytes_;
  std::optional<c10::Event> event_;  // none on the CPU, and before the first mark()
};

class PinnedPool {
 public:
  explicit PinnedPool(c10::Device device) : device_(device) {}

  // A buffer of at least so many bytes that nobody else holds and no copy uses. Allocates where
  // there is none, so a steady step does not.
  std::shared_ptr<PinnedBuffer> take(std::int64_t num_bytes);

 private:
  c10::Device device_;
  std::vector<std::shared_ptr<PinnedBuffer>> buffers_;
};

}  // namespace tradewind
