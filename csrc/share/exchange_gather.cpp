#include <exception>
#include <numeric>

#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {

// Whoever claimed the piece waits for the others' shards and puts them in place.
void Exchange::Impl::gather(std::int32_t piece_idx,
                            const std::function<void(int peer)>& waits_for) {
  const PieceMemory& piece = memory(piece_idx);
  for (int peer = 0; peer < size; ++peer) {
    TransferPtr transfer;
    {
      const std::scoped_lock lock(mutex);
      check_failed();
      transfer = state(piece_idx).gathering[static_cast<std::size_t>(peer)];
    }
    if (!transfer) continue;
    waits_for(peer);
    wait_for(transfer, peer, "its shard");
    if (is_lossy() && spreads_means()) {
      kernels.decode[static_cast<int>(options.codec)][static_cast<int>(piece.dtype)](
          piece.wire[static_cast<std::size_t>(peer)], piece.shard_elements(peer),
          piece.shard(peer));
    }
  }
  post_gathering(piece_idx);
  const std::scoped_lock lock(mutex);
  const auto& bytes = piece.gathered_bytes;
  received_bytes += std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}) -
                    bytes[static_cast<std::size_t>(rank)];
  last_progress = Clock::now();
  state(piece_idx).is_gathered = true;
  changed.notify_all();
}

// Takes shards as they come: most likely in the order in which this rank sends its own.
void Exchange::Impl::run_gatherer() {
  try {
    for (;;) {
      std::int32_t piece_idx = -1;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !expected.empty() || is_closing || !failure.empty(); });
        if (!failure.empty() || expected.empty()) break;
        piece_idx = expected.front();
        expected.pop_front();
        if (state(piece_idx).is_claimed) continue;
        state(piece_idx).is_claimed = true;
      }
      gather(piece_idx, [](int) {});
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace tradewind
