#include <exception>

#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {

// values of this rank's shard = mean over all ranks' parts, in rank order. Where ranks of a host
// sum first: over the hosts' sums, in the order of the ranks that hold them.
void Exchange::Impl::sum(std::int32_t piece_idx) {
  const PieceMemory& piece = memory(piece_idx);
  const std::int64_t num_elements = piece.shard_elements(rank);
  if (num_elements == 0) return;
  auto divisor = static_cast<double>(num_contributors);
  if (options.neighbours) {
    const double before = num_traders() == 0 ? divisor : host_divisor(piece.dtype);
    sum_on_host(piece_idx, rank, before);
    if (num_traders() == 0) return;
    divisor /= before;
  }
  std::vector<SumPart> parts;
  for (int peer = 0; peer < size; ++peer) {
    if (is_own(peer)) {
      parts.push_back({piece.shard(rank), true});
    } else if (trades_with(peer)) {
      parts.push_back({piece.staging[static_cast<std::size_t>(peer)], false});
    }
  }
  kernels.sum[static_cast<int>(options.codec)][static_cast<int>(piece.dtype)](
      parts.data(), static_cast<std::int64_t>(parts.size()), num_elements, divisor,
      piece.shard(rank));
}

// What is sent of a mean loses something, so this rank keeps what the others will have.
void Exchange::Impl::encode_mean(std::int32_t piece_idx) {
  const PieceMemory& piece = memory(piece_idx);
  const std::int64_t num_elements = piece.shard_elements(rank);
  if (num_elements == 0) return;
  const auto codec = static_cast<int>(options.codec);
  const auto dtype = static_cast<int>(piece.dtype);
  std::byte* wire = piece.wire[static_cast<std::size_t>(rank)];
  kernels.encode[codec][dtype](piece.shard(rank), num_elements, piece.shard_error(rank), wire);
  kernels.decode[codec][dtype](wire, num_elements, piece.shard(rank));
}

std::int64_t Exchange::Impl::staged_bytes(std::int32_t piece_idx) {
  const PieceMemory& piece = memory(piece_idx);
  return wire_bytes(options.codec, piece.dtype, piece.shard_elements(rank)) * num_traders();
}

void Exchange::Impl::offer(std::int32_t piece_idx) {
  if (callbacks.on_release) callbacks.on_release(piece_idx);
  if (options.neighbours) {
    spread(piece_idx, rank);
    note_spread(piece_idx);
  }
  const std::scoped_lock lock(mutex);
  state(piece_idx).is_offered = true;
  offered.push_back(piece_idx);
  for_sender.notify_all();
  for_step.notify_all();
}

void Exchange::Impl::sum_alone(std::int32_t bucket_idx) {
  const std::scoped_lock one_at_a_time(alone);
  const PlanBucket& bucket = plan.buckets()[static_cast<std::size_t>(bucket_idx)];
  bool is_last = false;
  for (std::int32_t i = 0; i < bucket.num_pieces; ++i) {
    const std::int32_t piece_idx = bucket.first_piece_idx + i;
    if (callbacks.on_sum) callbacks.on_sum(piece_idx);
    bool is_held = false;
    {
      const std::scoped_lock lock(mutex);
      PieceState& piece = state(piece_idx);
      piece.is_summed = piece.is_sent = piece.is_gathered = true;
      piece.is_offered = !callbacks.on_release;
      is_last = ++num_summed == order.size();
      is_held = !is_released;
      if (is_held && callbacks.on_release) held.push_back(piece_idx);
    }
    if (!is_held && callbacks.on_release) offer_alone(piece_idx);
  }
  if (is_last && callbacks.on_all_summed) callbacks.on_all_summed();
}

void Exchange::Impl::offer_alone(std::int32_t piece_idx) {
  callbacks.on_release(piece_idx);
  const std::scoped_lock lock(mutex);
  state(piece_idx).is_offered = true;
}

void Exchange::Impl::release_alone() {
  const std::scoped_lock one_at_a_time(alone);
  std::vector<std::int32_t> released;
  {
    const std::scoped_lock lock(mutex);
    released.swap(held);
  }
  for (const std::int32_t piece_idx : released) offer_alone(piece_idx);
}

void Exchange::Impl::run_summer() {
  try {
    for (;;) {
      std::int32_t piece_idx = -1;
      std::vector<std::int32_t> released;
      {
        std::unique_lock lock(mutex);
        for_summer.wait(lock, [&] {
          return num_summed < order.size() || (is_released && !held.empty()) || is_closing ||
                 !failure.empty();
        });
        if (!failure.empty()) break;
        if (is_released) released.swap(held);
        if (released.empty()) {
          if (num_summed >= order.size()) break;  // closing
          piece_idx = order[num_summed];
          const std::int32_t bucket = plan.pieces()[static_cast<std::size_t>(piece_idx)].bucket_idx;
          for_summer.wait(lock, [&] {
            return is_ready_on_host(bucket) || (is_released && !held.empty()) || is_closing ||
                   !failure.empty();
          });
          if (!failure.empty() || (is_closing && !is_ready_on_host(bucket))) break;
          if (!is_ready_on_host(bucket)) continue;
        }
      }
      for (const std::int32_t idx : released) offer(idx);
      if (piece_idx < 0) continue;

      for (int peer = 0; peer < size; ++peer) {
        TransferPtr transfer;
        {
          const std::scoped_lock lock(mutex);
          transfer = state(piece_idx).staging[static_cast<std::size_t>(peer)];
          summer_missing_peer = peer;
        }
        if (transfer) wait_for(transfer, peer, "its part of a sum");
      }
      sum(piece_idx);
      post_staging(piece_idx);
      if (spreads_means() && is_lossy() && num_traders() > 0) encode_mean(piece_idx);
      if (callbacks.on_sum) callbacks.on_sum(piece_idx);
      bool is_last = false, is_held = false;
      {
        const std::scoped_lock lock(mutex);
        summer_missing_peer = -1;
        received_bytes += staged_bytes(piece_idx);
        last_progress = Clock::now();
        state(piece_idx).is_summed = true;
        is_last = ++num_summed == order.size();
        is_held = callbacks.on_release && !is_released;
        if (is_held) {
          held.push_back(piece_idx);
          if (!urgency.empty()) for_sender.notify_all();  // for the lead; offer() does it else
        }
        for_step.notify_all();
      }
      if (!is_held) offer(piece_idx);
      if (is_last && callbacks.on_all_summed) callbacks.on_all_summed();
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace tradewind
