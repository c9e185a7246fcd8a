#include <algorithm>
#include <exception>

#include "arena/gate.h"
#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {
namespace {

constexpr std::chrono::milliseconds kStall{8};
constexpr const char* kDoing = "it to take what is sent";

std::uint32_t tag_of(const Exchange::Impl::Item& item) {
  return static_cast<std::uint32_t>(item.idx) * 4 + static_cast<std::uint32_t>(item.kind);
}

}  // namespace

// With the mutex held. Halves of a bucket that is needed sooner go first; without urgency, first
// halves, as they are what lets peers go on.
Exchange::Impl::Item Exchange::Impl::choose() const {
  if (!publishing.empty()) return {Item::Kind::kPublish, publishing.front()};
  Item scatter, gather;
  if (num_scattered < order.size()) {
    const std::int32_t next = order[num_scattered];
    const std::int32_t bucket = plan.pieces()[static_cast<std::size_t>(next)].bucket_idx;
    if (is_ready_on_host(bucket)) scatter = {Item::Kind::kScatter, next};
  }
  if (!offered.empty()) {
    gather = {Item::Kind::kGather,
              *std::min_element(offered.begin(), offered.end(),
                                [&](auto a, auto b) { return urgency_of(a) < urgency_of(b); })};
  }
  if (scatter.kind == Item::Kind::kNone) return gather;
  if (gather.kind == Item::Kind::kNone) return scatter;
  return urgency_of(gather.idx) < urgency_of(scatter.idx) ? gather : scatter;
}

// Receives are posted long before, so what keeps others from writing is that they cannot update
// before they have this rank's gradients.
void Exchange::Impl::wait_for_gate(const PieceMemory& piece) const {
  constexpr std::chrono::milliseconds kLookAgain{50};
  for (std::size_t peer = 0; peer < piece.gathered.size(); ++peer) {
    if (is_own(static_cast<int>(peer))) continue;
    while (!memory_gate().wait_until(piece.gathered[peer], piece.gathered_bytes[peer],
                                     Clock::now() + kLookAgain)) {
      const std::scoped_lock lock(mutex);
      check_failed();
      if (is_closing) return;  // what is sent now is cancelled
    }
  }
}

Exchange::Impl::UnderWay Exchange::Impl::start(const Item& item) {
  UnderWay made;
  made.item = item;
  const std::shared_ptr<Peers> to = connections();
  const auto send = [&](const void* data, std::int64_t size_bytes, int peer) {
    made.size_bytes += size_bytes;
    if (hosts.host_of(peer) != hosts.host_of(rank)) made.between_hosts_bytes += size_bytes;
    try {
      made.transfers.push_back({peer, to->send(data, size_bytes, peer, tag_of(item))});
    } catch (const std::exception& error) {
      tradewind::fail(ErrorKind::kPeerLost, lost(peer, kDoing, error.what()));
    }
  };
  if (item.kind == Item::Kind::kScatter && !spreads_means()) wait_for_gate(memory(item.idx));
  // Each rank begins with its neighbour, so that not all send to the same one at once.
  for (int distance = 1; distance < size; ++distance) {
    const int peer = (rank + distance) % size;
    const auto p = static_cast<std::size_t>(peer);
    if (item.kind != Item::Kind::kPublish && !trades_with(peer)) continue;
    switch (item.kind) {
      case Item::Kind::kScatter: {
        const PieceMemory& piece = memory(item.idx);
        const std::int64_t num_elements = piece.shard_elements(peer);
        if (num_elements == 0) break;
        if (options.neighbours) sum_on_host(item.idx, peer, host_divisor(piece.dtype));
        const void* data = piece.shard(peer);
        if (is_lossy()) {
          kernels.encode[static_cast<int>(options.codec)][static_cast<int>(piece.dtype)](
              data, num_elements, piece.shard_error(peer), piece.wire[p]);
          data = piece.wire[p];
        }
        send(data, wire_bytes(options.codec, piece.dtype, num_elements), peer);
        break;
      }
      case Item::Kind::kGather: {
        const PieceMemory& piece = memory(item.idx);
        const auto own = static_cast<std::size_t>(rank);
        if (piece.gathered_bytes[own] > 0) {
          send(piece.gathered[own], piece.gathered_bytes[own], peer);
        }
        break;
      }
      case Item::Kind::kPublish: {
        const std::vector<std::byte>& own = channels[static_cast<std::size_t>(item.idx)].own;
        if (!own.empty()) send(own.data(), static_cast<std::int64_t>(own.size()), peer);
        break;
      }
      case Item::Kind::kNone: break;
    }
  }
  const std::scoped_lock lock(mutex);
  for (const Sent& sent : made.transfers) {
    sending.push_back(sent.transfer);
    // Whoever cancelled all that was under way could not know of this.
    if (is_closing || !failure.empty()) sent.transfer->cancel();
  }
  return made;
}

void Exchange::Impl::finish(const UnderWay& done) {
  for (const Sent& sent : done.transfers) wait_for(sent.transfer, sent.peer, kDoing);
  const std::scoped_lock lock(mutex);
  statistics.sent_bytes += done.size_bytes;
  statistics.between_hosts_bytes += done.between_hosts_bytes;
  std::erase_if(sending, [&](const TransferPtr& transfer) {
    return std::any_of(done.transfers.begin(), done.transfers.end(),
                       [&](const Sent& sent) { return sent.transfer == transfer; });
  });
  if (done.item.kind == Item::Kind::kGather) state(done.item.idx).is_sent = true;
  if (done.item.kind == Item::Kind::kPublish) {
    channels[static_cast<std::size_t>(done.item.idx)].is_sent = true;
  }
  for_step.notify_all();
}

// With the mutex held. Between equal ranks what is received tells what has been delivered. Where
// nothing comes for a while, a rank is late, or the lead is too short for this wire and these
// cores.
bool Exchange::Impl::is_too_far_ahead() {
  if (urgency.empty() || started_bytes - received_bytes < lead_bytes) return false;
  if (Clock::now() - last_progress < kStall) return true;
  lead_bytes *= 2;
  return false;
}

void Exchange::Impl::run_sender() {
  std::deque<UnderWay> under_way;
  std::int64_t window = 0;
  const auto finish_oldest = [&] {
    window -= under_way.front().size_bytes;
    finish(under_way.front());
    under_way.pop_front();
  };
  try {
    std::unique_lock lock(mutex);
    while (failure.empty()) {
      const Item item = choose();
      const bool is_none = item.kind == Item::Kind::kNone;
      const bool is_bulk = !is_none && item.kind != Item::Kind::kPublish;
      if (is_none && is_closing) break;
      if (!under_way.empty() && (is_none || (is_bulk && window >= options.window_bytes))) {
        lock.unlock();
        finish_oldest();
        lock.lock();
        continue;
      }
      if (is_none) {
        for_sender.wait(lock);
        continue;
      }
      if (is_bulk && is_too_far_ahead()) {
        for_sender.wait_until(lock, last_progress + kStall);
        continue;
      }
      last_progress = Clock::now();
      if (item.kind == Item::Kind::kPublish) publishing.pop_front();
      if (item.kind == Item::Kind::kGather) std::erase(offered, item.idx);
      if (item.kind == Item::Kind::kScatter) {
        ++num_scattered;
        expect(item.idx);
      }
      lock.unlock();
      under_way.push_back(start(item));
      window += under_way.back().size_bytes;
      lock.lock();
      if (is_bulk && started_bytes == 0) round_began = round_ended = last_progress;
      if (is_bulk) started_bytes += under_way.back().size_bytes;
      for_gatherer.notify_all();
    }
    lock.unlock();
    while (!under_way.empty()) finish_oldest();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace tradewind
