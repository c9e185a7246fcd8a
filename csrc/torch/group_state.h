// The optimizer state of one param group: named arrays (a rule's states, the exponents of 8-bit
// ones, masters, step counts), each laid out like the group in arenas of its own. Tensors handed
// out share the arenas and keep them alive. Memory is zero until written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arena/gate.h"
#include "arena/layout.h"
#include "step/sweep.h"
#include "torch/zeroed_memory.h"

namespace tradewind {

// How a rule's states are stored.
enum class StatePrecision : std::uint8_t {
  kParameter,  // as the parameter is; float32 beside a master
  kFloat32,
  kBFloat16,  // rounded at random
  kEightBit,  // block by block, rounded at random
};

struct StorageOptions {
  Master master = Master::kNone;  // of 16-bit parameters
  StatePrecision states = StatePrecision::kParameter;
  std::uint64_t seed = 0;  // of random rounding
};

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

class GroupState {
 public:
  // `dtypes` and `shapes` of the group's parameters (complex ones as they are), all on `device`.
  GroupState(const RuleInfo& rule, const std::vector<DType>& dtypes,
             const std::vector<std::vector<std::int64_t>>& shapes, const StorageOptions& options,
             c10::Device device);

  // Points a slot's states, exponents and master at parameter number `idx` of the group.
  void bind(std::size_t idx, SweepSlot& slot) const;
  [[nodiscard]] float* step(std::size_t idx) const;
  // Tensors over the arrays of parameter `idx`, shaped like `like` (which must be dense), in the
  // order step, states, exponents, master.
  [[nodiscard]] std::vector<NamedTensor> tensors(std::size_t idx, const at::Tensor& like) const;

  // Of all arrays but the step counts, whole arenas; none where they are a device's.
  [[nodiscard]] std::vector<MemoryRange> memory() const;

  // Whether an optimizer's state dict has any entry for a parameter of this group.
  [[nodiscard]] bool is_empty() const { return arrays_.empty() && steps_.data == nullptr; }
  [[nodiscard]] Master master(std::size_t idx) const { return masters_[idx]; }
  [[nodiscard]] Format format(std::size_t idx, std::size_t state) const {
    return formats_[idx][state];
  }

 private:
  // One array for every parameter of the group that has it (others have no elements in it).
  struct Array {
    std::string name;
    bool has_parameter_shape;
    Layout layout = Layout::make({});
    std::vector<ZeroedMemory> arenas;

    [[nodiscard]] std::byte* data(std::size_t idx) const;
  };
  void add_array(const std::string& name, bool has_parameter_shape, std::vector<SlotSpec> specs);

  std::size_t num_states_ = 0;
  std::vector<std::vector<Format>> formats_;  // [parameter][state]
  std::vector<Master> masters_;
  std::vector<Array> arrays_;  // states, then their exponents, then the master
  std::size_t first_exponents_ = 0;
  bool has_exponents_ = false;
  bool has_masters_ = false;
  ZeroedMemory steps_;
  c10::Device device_;
};

}  // namespace tradewind
