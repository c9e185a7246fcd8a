#include "bindings/register.h"

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "The native core of Tradewind. Import it through tradewind._core, which checks torch.";
  tradewind::bindings::register_exceptions(module);
  tradewind::bindings::register_env(module);
  tradewind::bindings::register_checkpoint(module);
  tradewind::bindings::register_arena(module);
  tradewind::bindings::register_step(module);
  tradewind::bindings::register_optimizer(module);
  tradewind::bindings::register_cuda(module);
  tradewind::bindings::register_share(module);
  tradewind::bindings::register_collective(module);
}
