// A model's parameters in arenas. Adoption is all or nothing: every parameter is checked before the
// first moves. Each then has storage of its own over its slot; the objects stay the same ones.
// Their arenas live until the last tensor over them is gone. One thread: the one that runs the
// step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arena/gate.h"
#include "arena/layout.h"
#include "torch/zeroed_memory.h"

namespace tradewind {

class ParameterArena {
 public:
  // All parameters lie on one device, the arenas too. Throws Error naming the parameter that cannot
  // be adopted and why; the model is then as it was. Adds at most one copy of the parameters at the
  // peak, and none after.
  ParameterArena(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 const LayoutOptions& options);

  // Finds parameters whose memory is no longer their slot's (`.data =`, `.to()`) and copies them
  // back in. Returns their indices. Throws, before any change, where dtype, device or shape differ.
  std::vector<std::int64_t> bring_home();
  // Until no save needs the slots that bring_home() would write, which waits for them too: for
  // callers that hold a lock meanwhile.
  void wait_to_bring_home() const;

  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] std::int64_t size_bytes() const;
  // Of the arenas, whole; none where they are a device's.
  [[nodiscard]] std::vector<MemoryRange> memory() const;

 private:
  void check(std::size_t idx) const;
  [[nodiscard]] std::vector<std::int64_t> find_strayed() const;
  void move_in(std::size_t idx);
  [[nodiscard]] std::byte* slot_data(std::size_t idx) const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  Layout layout_;
  std::vector<ZeroedMemory> arenas_;
  std::vector<at::Tensor> homes_;  // a tensor over each slot, as the parameter was adopted
};

}  // namespace tradewind
