// The parameters of an optimizer on one device with their state: what the CPU's table and the
// device's share. It holds the parameters (not their memory, which is theirs to change) and owns
// the state; state tensors handed out keep their memory alive. One thread at a time: the one that
// runs forward and step.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "step/sweep.h"
#include "torch/gradient_arena.h"
#include "torch/group_state.h"
#include "torch/orthogonalize.h"

namespace tradewind {

// What one param group sets for one step, in the order of its rule's option_names.
struct GroupOptions {
  std::vector<double> values;
  bool maximize = false;
  MatrixOptions matrix = {};  // for a rule that needs whole matrices
};

// What a step says of one parameter that had a gradient.
struct ParameterStatistics {
  std::int64_t parameter_idx;
  std::int64_t num_elements;
  SlotMeasure measure;
  SlotChange change;
};

class OptimizerParameters {
 public:
  static constexpr std::int64_t kNoLongerFits = -1;

  struct Group {
    int rule_idx;
    GroupState state;

    [[nodiscard]] const RuleInfo& rule() const {
      return rules()[static_cast<std::size_t>(rule_idx)];
    }
  };

  struct Entry {
    std::string name;
    std::size_t group_idx = 0;
    std::size_t slot_idx = 0;  // within the group
    DType dtype = DType::kFloat32;
    at::DimVector sizes, strides;  // state has them too, where they are dense
    bool has_state = false;
    bool is_first = false;
    // The parameter's version after our last write: another one means that somebody else wrote.
    std::uint32_t version = 0;

    // A complex number is stepped as its two parts, as torch does.
    [[nodiscard]] DType real_dtype() const {
      if (dtype == DType::kComplex64) return DType::kFloat32;
      return dtype == DType::kComplex128 ? DType::kFloat64 : dtype;
    }
  };

  // One parameter of this step. `target` is the parameter or, where that has gaps, a dense copy;
  // the gradient lies in its order of elements.
  struct Collected {
    std::size_t idx;
    at::Tensor target, gradient;

    [[nodiscard]] std::int64_t num_elements() const {
      return target.numel() * (target.is_complex() ? 2 : 1);
    }
    [[nodiscard]] DType gradient_dtype(const Entry& entry) const;
  };

  OptimizerParameters(const StorageOptions& storage, c10::Device device)
      : storage_(storage), device_(device) {}

  // Adds a param group; group indices count from 0. Throws Error naming the parameter for one that
  // is not a strided tensor of a floating or complex dtype on the device, or that the storage does
  // not fit.
  void add_group(std::string_view rule_name, const std::vector<at::Tensor>& parameters,
                 const std::vector<std::string>& names);

  // Takes up this step's gradients. Returns how many parameters have one, or kNoLongerFits where a
  // parameter's shape or strides are no longer those that its state was laid out for: make a new
  // table then. Throws naming the parameter for a gradient that is sparse, or of another dtype,
  // device or shape.
  std::int64_t collect();
  // The same for some parameters.
  std::int64_t collect_some(std::span<const std::size_t> parameter_idx);
  // From now on gradients are these sums, where they hold the parameter. May be null.
  void take_sums(const GradientArena* sums) { sums_ = sums; }
  // From now on these are the gradients, where they are defined; by parameter, or empty.
  void take_gradients(std::vector<at::Tensor> gradients) { given_ = std::move(gradients); }
  [[nodiscard]] const std::vector<Collected>& collected() const { return collected_; }
  // Indices (over all groups, in order of addition) of collected parameters that have no state yet.
  [[nodiscard]] std::vector<std::int64_t> missing_state() const;
  // The same for all parameters that require a gradient.
  [[nodiscard]] std::vector<std::int64_t> missing_state_anywhere() const;

  // Gives a parameter its state, zero but for a master, which takes the parameter's value.
  // `is_first`: the next update is the rule's first for this parameter; false where the caller
  // fills the state from elsewhere.
  std::vector<NamedTensor> add_state(std::int64_t parameter_idx, bool is_first);
  // Sets a state from float values of the parameter's shape, in whatever way it is stored.
  void set_state(std::int64_t parameter_idx, std::int64_t state_idx, const at::Tensor& values);
  // Sets a master from float32 values, and the parameter to their rounding.
  void set_master(std::int64_t parameter_idx, const at::Tensor& values);

  // Throws where a group's options are NaN or too few.
  void check_options(const std::vector<GroupOptions>& groups) const;
  // Before an update: masters of collected parameters take up what somebody else wrote.
  void refresh_masters();
  // After an update: counts as a write to each collected parameter, as torch's in-place operations
  // do, and forgets what collect() took.
  void finish_update();
  // Forgets what collect() took.
  void forget();
  // Drops every gradient, as zero_grad(set_to_none=True) does.
  void release_gradients();

  [[nodiscard]] c10::Device device() const { return device_; }
  [[nodiscard]] const StorageOptions& storage() const { return storage_; }
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return parameters_; }
  [[nodiscard]] std::size_t num_groups() const { return groups_.size(); }
  // Of all states, exponents and masters, as GroupState::memory() has it.
  [[nodiscard]] std::vector<MemoryRange> memory() const;
  [[nodiscard]] std::size_t size() const { return parameters_.size(); }
  [[nodiscard]] Entry& entry(std::size_t idx) { return entries_[idx]; }
  [[nodiscard]] const Entry& entry(std::size_t idx) const { return entries_[idx]; }
  [[nodiscard]] const Group& group_of(const Entry& entry) const {
    return *groups_[entry.group_idx];
  }

 private:
  [[nodiscard]] bool take_gradient(std::size_t idx);
  void check_unchanged(const at::Tensor& parameter, const Entry& entry) const;
  [[nodiscard]] at::Tensor state_of(std::size_t idx, std::string_view name) const;
  void refresh_master(std::size_t idx);

  StorageOptions storage_;
  c10::Device device_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<at::Tensor> parameters_;
  std::vector<Entry> entries_;
  std::vector<Collected> collected_;
  struct WriteBack {
    at::Tensor parameter, dense;
  };
  std::vector<WriteBack> write_backs_;
  std::vector<const void*> checked_memory_;
  const GradientArena* sums_ = nullptr;
  std::vector<at::Tensor> given_;

  [[nodiscard]] at::Tensor gradient_of(std::size_t idx) const;
};

}  // namespace tradewind
