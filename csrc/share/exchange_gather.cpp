#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {

int Exchange::Impl::urgency_of(std::int32_t piece_idx) const {
  if (urgency.empty()) return 0;
  const std::int32_t bucket = plan.pieces()[static_cast<std::size_t>(piece_idx)].bucket_idx;
  return urgency[static_cast<std::size_t>(bucket)];
}

void Exchange::Impl::expect(std::int32_t piece_idx) {
  expected.push_back(piece_idx);
  if (gathering_piece < 0 || urgency_of(piece_idx) >= urgency_of(gathering_piece)) return;
  is_in_the_way = true;  // an interrupt would be lost on a transfer that is just over
  if (gathering_transfer) gathering_transfer->interrupt();
}

// Whoever claimed the piece waits for the others' shards and puts them in place. False where it was
// interrupted; what came until then stays.
bool Exchange::Impl::gather(std::int32_t piece_idx, int& waits_for) {
  const PieceMemory& piece = memory(piece_idx);
  for (int peer = 0; peer < size; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    TransferPtr transfer;
    {
      const std::scoped_lock lock(mutex);
      check_failed();
      transfer = state(piece_idx).gathering[p];
      waits_for = peer;
      if (gathering_piece == piece_idx) {
        if (is_in_the_way) return false;
        gathering_transfer = transfer;
      }
    }
    if (!transfer) continue;
    if (!wait_once(transfer, peer, "its shard")) return false;
    if (is_lossy() && spreads_means()) {
      kernels.decode[static_cast<int>(options.codec)][static_cast<int>(piece.dtype)](
          piece.wire[p], piece.shard_elements(peer), piece.shard(peer));
    }
    if (options.neighbours) spread(piece_idx, peer);
    const std::scoped_lock lock(mutex);
    received_bytes += piece.gathered_bytes[p];
    last_progress = Clock::now();
    check_failed();
    state(piece_idx).gathering[p] = nullptr;
  }
  post_gathering(piece_idx);
  if (options.neighbours) note_spread(piece_idx);
  const std::scoped_lock lock(mutex);
  state(piece_idx).is_gathered = true;
  round_ended = Clock::now();
  for_step.notify_all();
  for_sender.notify_all();
  return true;
}

// Takes shards as they come: the most urgent first, else in the order in which the first halves
// were sent.
void Exchange::Impl::run_gatherer() {
  try {
    std::unique_lock lock(mutex);
    for (;;) {
      for_gatherer.wait(lock, [&] { return !expected.empty() || is_closing || !failure.empty(); });
      if (!failure.empty() || expected.empty()) break;
      const auto next = std::min_element(
          expected.begin(), expected.end(),
          [&](std::int32_t a, std::int32_t b) { return urgency_of(a) < urgency_of(b); });
      const std::int32_t piece_idx = *next;
      expected.erase(next);
      if (state(piece_idx).is_claimed) continue;
      state(piece_idx).is_claimed = true;
      gathering_piece = piece_idx;
      is_in_the_way = false;
      lock.unlock();
      int peer = -1;
      const bool is_done = gather(piece_idx, peer);
      lock.lock();
      gathering_piece = -1;
      gathering_transfer = nullptr;
      if (is_done) continue;
      state(piece_idx).is_claimed = false;
      expected.push_back(piece_idx);
      for_step.notify_all();
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace tradewind
