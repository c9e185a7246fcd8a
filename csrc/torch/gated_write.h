// Tensors in host memory that something other than a sweep is about to write: it waits until no
// save needs their old values, see arena/gate.h. Any thread; callers have released the GIL where
// they can, so that whoever ends a save may run.
#pragma once

#include <ATen/core/Tensor.h>

#include "arena/gate.h"

namespace tradewind {

inline void wait_for_gate(const at::Tensor& written) {
  const Gate& gate = memory_gate();
  if (gate.is_open() || !written.device().is_cpu() || written.numel() == 0) return;
  std::int64_t last_element = 0;
  for (std::int64_t dim = 0; dim < written.dim(); ++dim) {
    last_element += (written.size(dim) - 1) * written.stride(dim);
  }
  gate.wait(written.const_data_ptr(),
            (last_element + 1) * static_cast<std::int64_t>(written.element_size()));
}

// to.copy_(from)
inline void copy_gated(const at::Tensor& to, const at::Tensor& from) {
  wait_for_gate(to);
  to.copy_(from);
}

}  // namespace tradewind
