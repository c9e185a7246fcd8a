// The injected parallel_for. The core owns no threads: whoever composes it passes the pool to use
// (torch's, by csrc/torch/parallel.cpp; std::thread or none in tests). A Parallel may be used only
// from the thread that runs forward and step, because OpenMP gives every calling thread a team.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tradewind {

// Runs body(context, begin, end) over disjoint ranges that cover [0, total). Ranges are at least
// `grain` long, except the last. The body must not throw.
using RangeBody = void (*)(void* context, std::int64_t begin, std::int64_t end);
using RunRanges = void (*)(std::int64_t total, std::int64_t grain, void* context, RangeBody body);

struct Parallel {
  RunRanges run;

  template <class Body>
  void for_ranges(std::int64_t total, std::int64_t grain, Body&& body) const {
    using Callable = std::remove_reference_t<Body>;
    run(total, grain, const_cast<void*>(static_cast<const void*>(&body)),
        [](void* context, std::int64_t begin, std::int64_t end) {
          (*static_cast<Callable*>(context))(begin, end);
        });
  }
};

// One range, on the calling thread.
inline constexpr Parallel kSerial{
    [](std::int64_t total, std::int64_t, void* context, RangeBody body) {
      if (total > 0) body(context, 0, total);
    }};

}  // namespace tradewind
