#include "torch/group_state.h"

#include <algorithm>
#include <utility>

#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

bool is_half(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

Format state_format(DType dtype, Master master, StatePrecision precision, bool is_positive) {
  switch (precision) {
    case StatePrecision::kFloat32: return Format::kFloat32;
    case StatePrecision::kBFloat16: return Format::kStochasticBFloat16;
    case StatePrecision::kEightBit: return is_positive ? Format::kPositive8 : Format::kSigned8;
    case StatePrecision::kParameter: break;
  }
  if (dtype == DType::kComplex64 || master != Master::kNone) return Format::kFloat32;
  return dtype == DType::kComplex128 ? Format::kFloat64 : format_of(dtype);
}

// What an array of this format is to an arena, and to torch.
DType stored_dtype(Format format, DType parameter) {
  switch (format) {
    case Format::kFloat32:
      return parameter == DType::kComplex64 ? DType::kComplex64 : DType::kFloat32;
    case Format::kFloat64:
      return parameter == DType::kComplex128 ? DType::kComplex128 : DType::kFloat64;
    case Format::kFloat16: return DType::kFloat16;
    case Format::kBFloat16:
    case Format::kStochasticBFloat16: return DType::kBFloat16;
    case Format::kSigned8:
    case Format::kPositive8: break;
  }
  return DType::kUInt8;
}

std::int64_t count_elements(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

}  // namespace

GroupState::GroupState(const RuleInfo& rule, const std::vector<DType>& dtypes,
                       const std::vector<std::vector<std::int64_t>>& shapes,
                       const StorageOptions& options, c10::Device device)
    : num_states_(rule.state_names.size()), device_(device) {
  const std::size_t count = dtypes.size();
  bool is_random = false;
  for (std::size_t i = 0; i < count; ++i) {
    masters_.push_back(is_half(dtypes[i]) ? options.master : Master::kNone);
    auto& formats = formats_.emplace_back();
    for (std::size_t s = 0; s < num_states_; ++s) {
      formats.push_back(
          state_format(dtypes[i], masters_[i], options.states, rule.state_is_positive[s]));
      is_random = is_random || formats.back() >= Format::kStochasticBFloat16;
      has_exponents_ = has_exponents_ || is_blockwise(formats.back());
    }
    has_masters_ = has_masters_ || masters_[i] != Master::kNone;
  }
  // By index: users may repeat names, or leave them empty.
  const auto specs_of = [&](auto dtype_of, auto shape_of) {
    std::vector<SlotSpec> specs;
    for (std::size_t i = 0; i < count; ++i) {
      specs.push_back({std::to_string(i), shape_of(i), dtype_of(i)});
    }
    return specs;
  };
  for (std::size_t s = 0; s < num_states_; ++s) {
    add_array(rule.state_names[s], true,
              specs_of([&](std::size_t i) { return stored_dtype(formats_[i][s], dtypes[i]); },
                       [&](std::size_t i) { return shapes[i]; }));
  }
  first_exponents_ = arrays_.size();
  for (std::size_t s = 0; s < num_states_ && has_exponents_; ++s) {
    add_array(std::string(rule.state_names[s]) + "_exponents", false,
              specs_of([](std::size_t) { return DType::kUInt8; },
                       [&](std::size_t i) -> std::vector<std::int64_t> {
                         return {num_exponent_blocks(count_elements(shapes[i]))};
                       }));
  }
  if (has_masters_) {
    const bool is_split = options.master == Master::kSplit;
    add_array(is_split ? "master_low" : "master", true,
              specs_of([&](std::size_t) { return is_split ? DType::kInt16 : DType::kFloat32; },
                       [&](std::size_t i) -> std::vector<std::int64_t> {
                         if (masters_[i] == Master::kNone) return {0};
                         return shapes[i];
                       }));
  }
  // Random rounding is seeded by the step, so that a resumed run goes on alike.
  if (rule.counts_steps || is_random) {
    steps_ = allocate_zeroed(static_cast<std::int64_t>(count * sizeof(float)), device_);
  }
}

void GroupState::add_array(const std::string& name, bool has_parameter_shape,
                           std::vector<SlotSpec> specs) {
  Array array{name, has_parameter_shape, Layout::make(specs), {}};
  for (const ArenaSpec& arena : array.layout.arenas()) {
    array.arenas.push_back(allocate_zeroed(arena.size_bytes, device_));
  }
  arrays_.push_back(std::move(array));
}

std::byte* GroupState::Array::data(std::size_t idx) const {
  const Slot& slot = layout.slots()[idx];
  return arenas[static_cast<std::size_t>(slot.arena_idx)].data + slot.offset_bytes;
}

void GroupState::bind(std::size_t idx, SweepSlot& slot) const {
  for (std::size_t s = 0; s < num_states_; ++s) {
    slot.states[s] = arrays_[s].data(idx);
    slot.state_formats[s] = formats_[idx][s];
    slot.exponents[s] =
        is_blockwise(formats_[idx][s])
            ? reinterpret_cast<std::uint8_t*>(arrays_[first_exponents_ + s].data(idx))
            : nullptr;
  }
  slot.master = masters_[idx];
  if (slot.master != Master::kNone) slot.master_data = arrays_.back().data(idx);
}

float* GroupState::step(std::size_t idx) const {
  return steps_.data == nullptr ? nullptr : reinterpret_cast<float*>(steps_.data) + idx;
}

std::vector<MemoryRange> GroupState::memory() const {
  std::vector<MemoryRange> ranges;
  if (!device_.is_cpu()) return ranges;
  for (const Array& array : arrays_) {
    for (std::size_t i = 0; i < array.arenas.size(); ++i) {
      ranges.push_back({array.arenas[i].data, array.layout.arenas()[i].size_bytes});
    }
  }
  return ranges;
}

std::vector<NamedTensor> GroupState::tensors(std::size_t idx, const at::Tensor& like) const {
  std::vector<NamedTensor> named;
  if (steps_.data != nullptr) {
    const at::Tensor scalar = like.detach().new_empty({}, at::TensorOptions().dtype(at::kFloat));
    named.push_back({"step", tensor_over(scalar, step(idx), steps_.keeper)});
  }
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const Array& array = arrays_[a];
    const Slot& slot = array.layout.slots()[idx];
    const bool is_master = has_masters_ && a + 1 == arrays_.size();
    const bool is_exponents = !array.has_parameter_shape;
    if (is_master && masters_[idx] == Master::kNone) continue;
    if (is_exponents && !is_blockwise(formats_[idx][a - first_exponents_])) continue;
    const at::ScalarType dtype = torch_dtype(slot.dtype);
    const auto& arena = array.arenas[static_cast<std::size_t>(slot.arena_idx)];
    const at::Tensor shaped =
        is_exponents ? like.detach().new_empty(slot.shape, at::TensorOptions().dtype(dtype)) : like;
    named.push_back({array.name, tensor_over(shaped, dtype, array.data(idx), arena.keeper)});
  }
  return named;
}

}  // namespace tradewind
