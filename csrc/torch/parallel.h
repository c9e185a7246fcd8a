// torch's own thread pool as the core's Parallel. Only the thread that runs forward and step may
// use it (see base/parallel.h).
#pragma once

#include "base/parallel.h"

namespace tradewind {

extern const Parallel kTorchParallel;

}  // namespace tradewind
