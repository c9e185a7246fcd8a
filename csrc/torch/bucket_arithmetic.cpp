#include "torch/bucket_arithmetic.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "base/error.h"
#include "share/cuda/library.h"
#include "share/kernels.h"
#include "step/blocks.h"
#include "step/kernels.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

std::size_t at_codec(const BucketRun& run) { return static_cast<std::size_t>(run.codec); }
std::size_t at_dtype(const BucketRun& run) { return static_cast<std::size_t>(run.dtype); }

class HostArithmetic final : public BucketArithmetic {
 public:
  void encode(const BucketRun& run, const void* values, float* error, std::byte* wire,
              void*) override {
    share_kernels().encode[at_codec(run)][at_dtype(run)](values, run.num_elements, error, wire);
  }

  void decode(const BucketRun& run, const std::byte* wire, void* values, void*) override {
    share_kernels().decode[at_codec(run)][at_dtype(run)](wire, run.num_elements, values);
  }

  void sum(const BucketRun& run, const RankParts& parts, double divisor, void* values,
           void*) override {
    std::vector<SumPart> pointers;
    for (int rank = 0; rank < parts.num_parts; ++rank) {
      pointers.push_back({parts.first + rank * parts.part_bytes, false});
    }
    share_kernels().sum[at_codec(run)][at_dtype(run)](pointers.data(), parts.num_parts,
                                                      run.num_elements, divisor, values);
  }

  void divide(const BucketRun& run, double divisor, void* values, void*) override {
    const SumPart itself{values, true};
    const auto kernel = share_kernels().sum[static_cast<int>(Codec::kNone)][at_dtype(run)];
    kernel(&itself, 1, run.num_elements, divisor, values);
  }

  void copy(const void* from, void* to, std::int64_t num_bytes, void*) override {
    std::memcpy(to, from, static_cast<std::size_t>(num_bytes));
  }

  void note_sizes(const std::vector<at::Tensor>& slots, const at::Tensor& sizes) override {
    std::vector<BlockMeasure> blocks;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const at::Tensor& slot = slots[i];
      blocks.resize(static_cast<std::size_t>(num_norm_blocks(slot.numel())));
      kernels().measure[static_cast<int>(*arena_dtype(slot.scalar_type()))](
          slot.const_data_ptr(), slot.numel(), blocks.data());
      bool is_finite = true;
      for (const BlockMeasure& block : blocks) is_finite &= std::isfinite(block.sum_of_squares);
      sizes.select(0, static_cast<std::int64_t>(i))
          .fill_(is_finite ? 0.0 : std::numeric_limits<double>::infinity());
    }
  }
};

class DeviceArithmetic final : public BucketArithmetic {
 public:
  DeviceArithmetic(c10::Device device, std::string library_path)
      : device_(device), library_path_(std::move(library_path)) {}

  void encode(const BucketRun& run, const void* values, float* error, std::byte* wire,
              void* stream) override {
    const TradewindCudaRun given = cuda_run(run);
    check(library().encode(&given, values, error, wire, stream), "encode");
  }

  void decode(const BucketRun& run, const std::byte* wire, void* values, void* stream) override {
    const TradewindCudaRun given = cuda_run(run);
    check(library().decode(&given, wire, values, stream), "decode");
  }

  void sum(const BucketRun& run, const RankParts& parts, double divisor, void* values,
           void* stream) override {
    const TradewindCudaRun given = cuda_run(run);
    const auto* there = static_cast<const TradewindCudaPart*>(on_device(parts).const_data_ptr());
    check(library().sum(&given, there, parts.num_parts, divisor, values, stream), "sum");
  }

  void divide(const BucketRun& run, double divisor, void* values, void*) override {
    values_at(values, run.num_elements, torch_dtype(run.dtype)).div_(divisor);
  }

  void copy(const void* from, void* to, std::int64_t num_bytes, void*) override {
    values_at(to, num_bytes, at::kByte).copy_(values_at(from, num_bytes, at::kByte));
  }

  void note_sizes(const std::vector<at::Tensor>& slots, const at::Tensor& sizes) override {
    // The largest magnitude: NaN goes before infinity, and nothing finite overflows.
    at::Tensor to = sizes;
    at::stack_out(to, at::_foreach_norm(slots, std::numeric_limits<double>::infinity()));
  }

 private:
  [[nodiscard]] at::Tensor values_at(const void* data, std::int64_t size,
                                     at::ScalarType dtype) const {
    // SAFETY: buckets and staging memory outlive what is queued on them.
    return row_over(const_cast<void*>(data), size, dtype, device_);
  }

  static TradewindCudaRun cuda_run(const BucketRun& run) {
    return {run.num_elements, static_cast<std::int32_t>(run.codec),
            static_cast<std::int32_t>(run.dtype)};
  }

  const ShareCudaLibrary& library() {
    if (!library_) library_ = std::make_unique<ShareCudaLibrary>(library_path_);
    return *library_;
  }

  void check(int code, const char* what) {
    library().check(code, (std::string("sharing on the device: ") + what).c_str());
  }

  // Kernels read the pointers from device memory. Staging memory stays, so each list is sent once.
  const at::Tensor& on_device(const RankParts& parts) {
    at::Tensor& there = lists_[{parts.first, parts.part_bytes}];
    if (there.defined()) return there;
    std::vector<TradewindCudaPart> list;
    for (int rank = 0; rank < parts.num_parts; ++rank) {
      list.push_back({parts.first + rank * parts.part_bytes, 0});
    }
    const auto num_bytes = static_cast<std::int64_t>(list.size() * sizeof(TradewindCudaPart));
    there = at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    there.copy_(row_over(list.data(), num_bytes, at::kByte, c10::Device(c10::kCPU)));
    return there;
  }

  c10::Device device_;
  std::string library_path_;
  std::unique_ptr<ShareCudaLibrary> library_;
  std::map<std::pair<const std::byte*, std::int64_t>, at::Tensor> lists_;
};

}  // namespace

std::unique_ptr<BucketArithmetic> make_bucket_arithmetic(c10::Device device,
                                                         std::string library_path, bool emulates) {
  if (device.is_cpu() && !emulates) return std::make_unique<HostArithmetic>();
  return std::make_unique<DeviceArithmetic>(device, std::move(library_path));
}

}  // namespace tradewind
