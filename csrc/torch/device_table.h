// OptimizerTable's counterpart on a device that libtradewind_cuda steps: parameters with their
// state in the device's memory, and one step over all of them, queued on a stream. A step waits for
// nothing, allocates nothing once it has been taken with the same gradients' shapes, and queues the
// same number of kernels for any number of tensors (but for matrix products). One thread at a time.
//
// A step is collect() -> add_state() for what missing_state() lists -> prepare() -> measure()
// (optional) -> update(). Nothing of the model changes before update(), and where the device finds
// a reason to veto, nothing but the device's own counters does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "step/cuda/library.h"
#include "torch/device_image.h"
#include "torch/gradient_arena.h"
#include "torch/gradient_hooks.h"
#include "torch/optimizer_parameters.h"
#include "torch/step_reading.h"

namespace tradewind {

// A loss scale that the device keeps, by torch.amp.GradScaler's rules.
struct DeviceLossScale {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  double floor = 0.0;
  std::int32_t growth_interval = 0;  // 0: none is kept
};

struct DeviceOrders {
  double gradient_multiplier = 1.0;
  double max_norm = -1.0;            // negative: no clipping
  at::Tensor grad_scale, found_inf;  // undefined, or one float32 on the device
  bool measures = false;
  bool vetoes_nonfinite = false;
  bool wants_statistics = false;  // measures of each parameter with the reading
  bool wants_changes = false;     // how far each parameter moved, too
  bool is_capturing = false;
};

class DeviceBackwardUpdate;

class DeviceTable {
 public:
  // Directions of as many matrices as fit into `max_direction_bytes` are worked out side by side,
  // and of one at least: the more, the fewer sweeps; the fewer, the less memory.
  DeviceTable(std::shared_ptr<const CudaLibrary> library, c10::Device device,
              const StorageOptions& storage, std::int64_t max_direction_bytes);
  ~DeviceTable();
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

  // `numbers`: of each parameter in its optimizer, which random rounding depends on. All groups
  // come before the first step.
  void add_group(std::string_view rule_name, const std::vector<at::Tensor>& parameters,
                 const std::vector<std::string>& names, const std::vector<std::int64_t>& numbers);
  [[nodiscard]] OptimizerParameters& parameters() { return parameters_; }
  // Gives state, and says of a rule without step counts whether its next update is the first.
  std::vector<NamedTensor> add_state(std::int64_t parameter_idx, bool is_first);

  std::int64_t collect();
  // Sends what changed since the last step. `learning_rates`: for each group undefined, or one
  // float32 or float64 on the device, read there in place of its first option. Throws before any
  // change where options are NaN or too few.
  void prepare(std::vector<GroupOptions> groups, const std::vector<at::Tensor>& learning_rates,
               const DeviceOrders& orders);
  // Measures what collect() took. `stream`: the device's current one.
  void measure(void* stream);
  // Sum of squares and number of parameters with a NaN or infinity, float64 on the device: a step
  // over several devices adds them up between measure() and update().
  [[nodiscard]] at::Tensor sums() const;
  // Decides, and applies the rules. Null where the orders ask for no numbers.
  std::shared_ptr<StepReading> update(void* stream);
  // The numbers once more, after a graph's replay of the last update().
  std::shared_ptr<StepReading> read_again();
  void release_gradients();

  // From now on 16-bit gradients are summed in float32, by hooks in backward, and freed.
  void hook_sums();
  // From now on hooks step parameters in backward, between begin() and end() of backward_update().
  void hook_updates();
  // Null before hook_updates().
  [[nodiscard]] DeviceBackwardUpdate* backward_update() const { return backward_update_.get(); }
  void install_hooks();
  void remove_hooks() noexcept;
  // Sums gradients whose hook did not fire.
  void sum_gradients();

  // From now on every step divides gradients by loss_scale(), and moves it then.
  void keep_loss_scale(double initial, const DeviceLossScale& options);
  // In the device's memory, where losses may be multiplied by it without a wait: 0-d, float32.
  [[nodiscard]] at::Tensor loss_scale();
  // Of the last step: int32, one element, not 0 where vetoed.
  [[nodiscard]] at::Tensor vetoed();
  // Takes over loss scale and counters of the table before it, and by `from_idx` (-1: none) of
  // each parameter whether it has been updated.
  void carry_over(DeviceTable& before, const std::vector<std::int64_t>& from_idx);
  [[nodiscard]] std::int64_t num_uploads() const;

 private:
  struct Pass {
    int rule_idx;
    bool is_double;
    std::vector<std::int32_t> slots;
    std::int64_t slot_place, block_place;
    std::int64_t direction_bytes;  // of all its slots
  };

  DeviceImage& image();
  void fill_slots(const std::vector<GroupOptions>& groups);
  void fill_slot(std::size_t i, const GroupOptions& options, TradewindCudaSlot& slot);
  void fill_groups(const std::vector<GroupOptions>& groups,
                   const std::vector<at::Tensor>& learning_rates);
  void fill_settings(const DeviceOrders& orders);
  void plan_passes();
  void fill_lists();
  void place_directions();
  void run(const Pass& pass, void* stream);
  void orthogonalize_all(const Pass& pass);
  void note_slots();
  std::shared_ptr<StepReading> read_back();
  void check(int code) const { library_->check(code, "step on the device"); }

  std::shared_ptr<const CudaLibrary> library_;
  OptimizerParameters parameters_;
  std::int64_t max_direction_bytes_;
  std::vector<std::int64_t> numbers_;
  std::unique_ptr<DeviceImage> image_;
  at::Tensor has_stepped_;  // uint8, one for each parameter
  std::vector<Pass> passes_;
  std::vector<GroupOptions> groups_;  // of the step under way
  DeviceOrders orders_;
  DeviceLossScale loss_scale_;
  at::Tensor directions_;
  PinnedPool readings_;
  std::vector<std::shared_ptr<PinnedBuffer>> captured_;
  std::shared_ptr<PinnedBuffer> for_capture_;
  std::shared_ptr<const std::vector<StepReading::Slot>> slots_of_reading_;
  std::unique_ptr<GradientArena> sums_;
  std::unique_ptr<DeviceBackwardUpdate> backward_update_;
  // Last, so that no hook finds the rest gone.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace tradewind
