#include "share/exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {
namespace {

constexpr std::chrono::seconds kGoodbye{2};
// Shards begin at a cache line within what is allocated for them.
constexpr std::int64_t kAlignment = 64;

std::int64_t round_up(std::int64_t size_bytes) {
  return (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::byte* aligned(const std::unique_ptr<std::byte[]>& memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  return memory.get() + (kAlignment - address % kAlignment) % kAlignment;
}

std::unique_ptr<std::byte[]> allocate(std::int64_t size_bytes) {
  return std::unique_ptr<std::byte[]>(
      new std::byte[static_cast<std::size_t>(size_bytes + kAlignment)]);
}

// Tags of channels; pieces' are below (see tag_of).
std::uint32_t channel_tag(std::int32_t idx) { return static_cast<std::uint32_t>(idx) * 4 + 3; }

}  // namespace

// --- construction --------------------------------------------------------------------------------

Exchange::Impl::Impl(const Plan& the_plan, Memory gradients, Memory gathered,
                     std::shared_ptr<Peers> the_peers, std::shared_ptr<Board> the_board,
                     const Options& the_options, Callbacks the_callbacks,
                     std::vector<std::vector<std::int64_t>> channel_bytes)
    : plan(the_plan),
      options(the_options),
      callbacks(std::move(the_callbacks)),
      board(std::move(the_board)),
      rank(the_peers->rank()),
      size(the_peers->size()),
      hosts(the_options.hosts.num_ranks() > 0 ? the_options.hosts : Hosts::apart(size)),
      kernels(share_kernels()),
      peers(std::move(the_peers)),
      is_ready(the_plan.buckets().size()) {
  if (plan.world_size() != size) {
    tradewind::fail(ErrorKind::kBadValue, "plan: expected one of ", size, " ranks, got one of ",
                    plan.world_size());
  }
  if (options.neighbours && !spreads_means()) {
    tradewind::fail(ErrorKind::kBadValue,
                    "neighbours: expected means to be gathered, got something made of them; leave "
                    "out on_release, or the neighbours");
  }
  for (const ArenaSpec& arena : gradients.layout->arenas()) {
    if (is_lossy() && !takes(options.codec, arena.dtype)) {
      tradewind::fail(ErrorKind::kBadType, "codec ", name_of(options.codec),
                      ": expected gradients of float32, bfloat16 or float16, got ",
                      dtype_name(arena.dtype));
    }
  }
  lay_out(gradients, gathered);
  states.resize(plan.pieces().size());
  order.resize(0);
  for (std::size_t piece = 0; piece < plan.pieces().size(); ++piece) {
    next_order.push_back(static_cast<std::int32_t>(piece));
  }
  channel_bytes.emplace_back(static_cast<std::size_t>(size), 1);
  for (const auto& bytes : channel_bytes) {
    Channel& channel = channels.emplace_back();
    for (const std::int64_t num_bytes : bytes) {
      channel.received.emplace_back(static_cast<std::size_t>(num_bytes));
    }
    channel.own.resize(static_cast<std::size_t>(bytes[static_cast<std::size_t>(rank)]));
    channel.receiving.resize(static_cast<std::size_t>(size));
  }
  for (PieceState& piece : states) {
    piece = {true, true, true, true, true, {}, {}};
    piece.staging.resize(static_cast<std::size_t>(size));
    piece.gathering.resize(static_cast<std::size_t>(size));
  }
  if (size == 1) return;
  try {
    connect();
  } catch (...) {
    end();
    throw;
  }
}

void Exchange::Impl::connect() {
  for (std::size_t piece = 0; piece < states.size(); ++piece) {
    post_staging(static_cast<std::int32_t>(piece));
    post_gathering(static_cast<std::int32_t>(piece));
  }
  for (std::size_t channel = 0; channel < channels.size(); ++channel) {
    post_channel(static_cast<std::int32_t>(channel));
  }
  num_live_threads = options.neighbours ? 5 : 4;
  const auto start_thread = [&](void (Impl::*run)()) {
    threads.emplace_back([this, run] {
      (this->*run)();
      const std::scoped_lock lock(mutex);
      --num_live_threads;
      for_watcher.notify_all();
    });
  };
  start_thread(&Impl::run_sender);
  start_thread(&Impl::run_summer);
  start_thread(&Impl::run_gatherer);
  start_thread(&Impl::run_watcher);
  if (options.neighbours) start_thread(&Impl::run_host);
}

void Exchange::Impl::lay_out(const Memory& gradients, const Memory& gathered) {
  const bool keeps_errors = is_lossy() && options.error_feedback;
  for (std::size_t arena = 0; keeps_errors && arena < gradients.arenas.size(); ++arena) {
    const ArenaSpec& spec = gradients.layout->arenas()[arena];
    errors.emplace_back(static_cast<std::size_t>(spec.size_bytes / element_bytes(spec.dtype)));
  }
  const auto ranks = static_cast<std::size_t>(size);
  for (const PlanPiece& cuts : plan.pieces()) {
    const PlanBucket& bucket = plan.buckets()[static_cast<std::size_t>(cuts.bucket_idx)];
    const auto arena = static_cast<std::size_t>(bucket.arena_idx);
    PieceMemory piece;
    piece.dtype = gradients.layout->arenas()[arena].dtype;
    const std::int64_t bytes = element_bytes(piece.dtype);
    const std::int64_t begin =
        range_between(*gradients.layout, cuts.cuts.front(), cuts.cuts.front()).begin_bytes;
    piece.values = gradients.arenas[arena] + begin;
    const int num_places = options.neighbours ? options.neighbours->num_places() : 0;
    for (int place = 0; place < num_places; ++place) {
      piece.neighbours.push_back(options.neighbours->arena(place, arena) + begin);
    }
    if (keeps_errors) piece.error = errors[arena].data() + begin / bytes;
    std::vector<std::int64_t> encoded(ranks);
    for (std::size_t r = 0; r <= ranks; ++r) {
      const ByteRange range = range_between(*gradients.layout, cuts.cuts.front(), cuts.cuts[r]);
      piece.value_offsets.push_back(range.size_bytes() / bytes);
      if (r == 0) continue;
      const int peer = static_cast<int>(r) - 1;
      if (!is_own(peer) && !trades_with(peer)) continue;
      encoded[r - 1] = wire_bytes(options.codec, piece.dtype, piece.shard_elements(peer));
    }
    const std::int64_t own_bytes = encoded[static_cast<std::size_t>(rank)];
    staging_memory.push_back(allocate(round_up(own_bytes) * num_traders()));
    std::byte* staging = aligned(staging_memory.back());
    if (is_lossy()) {
      const auto sum = std::accumulate(
          encoded.begin(), encoded.end(), std::int64_t{0},
          [](std::int64_t total, std::int64_t part) { return total + round_up(part); });
      wire_memory.push_back(allocate(sum));
    }
    std::byte* wire = is_lossy() ? aligned(wire_memory.back()) : nullptr;
    for (std::size_t r = 0; r < ranks; ++r) {
      const bool is_traded = trades_with(static_cast<int>(r));
      piece.staging.push_back(is_traded ? staging : nullptr);
      if (is_traded) staging += round_up(own_bytes);
      if (is_lossy()) {
        piece.wire.push_back(wire);
        wire += round_up(encoded[r]);
      }
      if (spreads_means()) {
        piece.gathered.push_back(is_lossy() ? piece.wire[r] : piece.shard(static_cast<int>(r)));
        piece.gathered_bytes.push_back(encoded[r]);
      } else {
        const auto place = [&](const Cut& cut) {
          if (gathered.place) return gathered.place(cut);
          return gathered.arenas[arena] + range_between(*gathered.layout, cut, cut).begin_bytes;
        };
        piece.gathered.push_back(place(cuts.cuts[r]));
        piece.gathered_bytes.push_back(place(cuts.cuts[r + 1]) - place(cuts.cuts[r]));
      }
    }
    memories.push_back(std::move(piece));
  }
}

Exchange::Impl::~Impl() noexcept {
  bool waits = false;
  if (size > 1) {
    const std::scoped_lock lock(mutex);
    waits = failure.empty();
    goodbye_until = Clock::now() + kGoodbye;
    activity = "has left";
    if (waits) publishing.push_back(static_cast<std::int32_t>(channels.size()) - 1);
    wake_all();
  }
  if (waits && board) board->post("has left");
  for (int peer = 0; waits && peer < size; ++peer) {
    TransferPtr transfer;
    {
      const std::scoped_lock lock(mutex);
      transfer = channels.back().receiving[static_cast<std::size_t>(peer)];
    }
    try {
      while (transfer && !transfer->wait()) {
      }
    } catch (...) {  // gone already, or takes too long
    }
  }
  end();
}

// --- receives ---------------------------------------------------------------------------------

void Exchange::Impl::keep(std::vector<TransferPtr>& where, std::vector<TransferPtr> made) {
  const std::scoped_lock lock(mutex);
  if (!failure.empty()) return;  // would hold connections open that are closed, or will be
  for (const TransferPtr& transfer : made) {
    if (is_closing && transfer) transfer->cancel();
  }
  where = std::move(made);
}

std::shared_ptr<Peers> Exchange::Impl::connections() const {
  const std::scoped_lock lock(mutex);
  check_failed();
  return peers;
}

TransferPtr Exchange::Impl::receive(std::byte* data, std::int64_t size_bytes, int peer,
                                    std::uint32_t tag) {
  const std::shared_ptr<Peers> from = connections();
  try {
    return from->receive(data, size_bytes, peer, tag);
  } catch (const std::exception& error) {
    tradewind::fail(ErrorKind::kPeerLost, lost(peer, "what it sends next", error.what()));
  }
}

void Exchange::Impl::post_staging(std::int32_t piece_idx) {
  const PieceMemory& piece = memory(piece_idx);
  const std::int64_t num_bytes = wire_bytes(options.codec, piece.dtype, piece.shard_elements(rank));
  std::vector<TransferPtr> made(static_cast<std::size_t>(size));
  for (int peer = 0; peer < size && num_bytes > 0; ++peer) {
    if (!trades_with(peer)) continue;
    const auto p = static_cast<std::size_t>(peer);
    made[p] =
        receive(piece.staging[p], num_bytes, peer, static_cast<std::uint32_t>(piece_idx) * 4 + 1);
  }
  keep(state(piece_idx).staging, std::move(made));
}

void Exchange::Impl::post_gathering(std::int32_t piece_idx) {
  const PieceMemory& piece = memory(piece_idx);
  std::vector<TransferPtr> made(static_cast<std::size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (!trades_with(peer) || piece.gathered_bytes[p] == 0) continue;
    made[p] = receive(piece.gathered[p], piece.gathered_bytes[p], peer,
                      static_cast<std::uint32_t>(piece_idx) * 4 + 2);
  }
  keep(state(piece_idx).gathering, std::move(made));
}

void Exchange::Impl::post_channel(std::int32_t channel_idx) {
  Channel& channel = channels[static_cast<std::size_t>(channel_idx)];
  std::vector<TransferPtr> made(static_cast<std::size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    std::vector<std::byte>& received = channel.received[static_cast<std::size_t>(peer)];
    if (is_own(peer) || received.empty()) continue;
    made[static_cast<std::size_t>(peer)] =
        receive(received.data(), static_cast<std::int64_t>(received.size()), peer,
                channel_tag(channel_idx));
  }
  keep(channel.receiving, std::move(made));
}

// --- waiting -------------------------------------------------------------------------------------

void Exchange::Impl::check_failed() const {
  if (!failure.empty()) tradewind::fail(ErrorKind::kPeerLost, failure);
}

bool Exchange::Impl::wait_once(const TransferPtr& transfer, int peer, const std::string& doing) {
  try {
    return transfer->wait();
  } catch (const std::exception& error) {
    {
      const std::scoped_lock lock(mutex);
      check_failed();
      if (is_closing) throw;
    }
    tradewind::fail(ErrorKind::kPeerLost, lost(peer, doing, error.what()));
  }
}

void Exchange::Impl::wait_for(const TransferPtr& transfer, int peer, const std::string& doing) {
  while (!wait_once(transfer, peer, doing)) {
  }
}

namespace {

// While it lives, the step's thread is waiting, and the watcher knows for what.
class Waiting {
 public:
  Waiting(Exchange::Impl& exchange, std::string what) : exchange_(exchange) {
    const std::scoped_lock lock(exchange_.mutex);
    exchange_.is_waiting = true;
    exchange_.waiting_since = Clock::now();
    exchange_.waiting_for = std::move(what);
  }
  ~Waiting() {
    const std::scoped_lock lock(exchange_.mutex);
    exchange_.is_waiting = false;
    exchange_.missing_peer = -1;
    exchange_.statistics.waited_s +=
        std::chrono::duration<double>(Clock::now() - exchange_.waiting_since).count();
    if (!exchange_.failure.empty()) exchange_.for_watcher.notify_all();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Exchange::Impl& exchange_;
};

std::string bucket_text(const Exchange::Impl& exchange, std::int32_t bucket_idx) {
  return "bucket " + std::to_string(bucket_idx) + " of " +
         std::to_string(exchange.plan.buckets().size());
}

}  // namespace

// On the step's thread, which gathers what it needs itself where nobody does yet.
void Exchange::Impl::wait_gathered(std::int32_t piece_idx) {
  {
    std::unique_lock lock(mutex);
    for_step.wait(lock, [&] {
      const PieceState& piece = state(piece_idx);
      return (piece.is_offered && (!piece.is_claimed || piece.is_gathered)) || !failure.empty();
    });
    check_failed();
    if (state(piece_idx).is_gathered) return;
    state(piece_idx).is_claimed = true;
  }
  or_fail([&] {
    while (!gather(piece_idx, missing_peer)) {
    }
  });
}

// --- the public side -----------------------------------------------------------------------------

Exchange::Exchange(const Plan& plan, Memory gradients, Memory gathered,
                   std::shared_ptr<Peers> peers, std::shared_ptr<Board> board,
                   const Options& options, Callbacks callbacks,
                   std::vector<std::vector<std::int64_t>> channel_bytes)
    : impl_(std::make_unique<Impl>(plan, std::move(gradients), std::move(gathered),
                                   std::move(peers), std::move(board), options,
                                   std::move(callbacks), std::move(channel_bytes))) {}

Exchange::~Exchange() noexcept = default;

void Exchange::set_order(std::vector<std::int32_t> buckets, std::vector<std::int32_t> urgency) {
  std::vector<std::int32_t> pieces;
  for (const std::int32_t bucket_idx : buckets) {
    const PlanBucket& bucket = impl_->plan.buckets().at(static_cast<std::size_t>(bucket_idx));
    for (std::int32_t i = 0; i < bucket.num_pieces; ++i) {
      pieces.push_back(bucket.first_piece_idx + i);
    }
  }
  const std::scoped_lock lock(impl_->mutex);
  impl_->next_order = std::move(pieces);
  impl_->next_urgency = std::move(urgency);
}

void Exchange::begin(std::int64_t num_contributors) {
  wait_all();
  // The last channel is the goodbye, which ends no round.
  const auto num_channels = static_cast<std::int32_t>(impl_->channels.size()) - 1;
  for (std::int32_t channel = 0; channel < num_channels; ++channel) {
    if (statistics().num_rounds == 0 || impl_->size == 1) continue;
    (void)published(channel, impl_->rank);
    impl_->or_fail([&] { impl_->post_channel(channel); });
  }
  std::unique_lock lock(impl_->mutex);
  impl_->check_failed();
  impl_->num_contributors = num_contributors;
  impl_->order = impl_->next_order;
  impl_->urgency = impl_->next_urgency;
  impl_->is_released = false;
  impl_->is_ready.assign(impl_->is_ready.size(), false);
  impl_->num_scattered = impl_->num_summed = 0;
  for (PieceState& piece : impl_->states) {
    piece.is_summed = piece.is_offered = piece.is_sent = false;
    piece.is_claimed = piece.is_gathered = false;
    piece.num_spread = 0;
  }
  impl_->expected.clear();
  if (impl_->started_bytes > 0) {
    impl_->statistics.busy_s +=
        std::chrono::duration<double>(impl_->round_ended - impl_->round_began).count();
  }
  impl_->started_bytes = impl_->received_bytes = 0;
  impl_->last_progress = Clock::now();
  // Shrinks again where it has grown too long.
  impl_->lead_bytes = std::max(impl_->options.lead_bytes, impl_->lead_bytes / 20 * 19);
  for (Channel& channel : impl_->channels) channel.is_published = channel.is_received = false;
  ++impl_->statistics.num_rounds;
  lock.unlock();
  impl_->check_neighbours();
}

void Exchange::ready(std::int32_t bucket_idx) {
  std::int64_t round = 0;
  {
    const std::scoped_lock lock(impl_->mutex);
    impl_->is_ready[static_cast<std::size_t>(bucket_idx)] = true;
    round = impl_->statistics.num_rounds;
  }
  if (impl_->size > 1) {
    if (impl_->options.neighbours) {
      impl_->options.neighbours->announce(bucket_idx, static_cast<std::uint64_t>(round));
    }
    impl_->for_sender.notify_all();
    impl_->for_summer.notify_all();
    return;
  }
  impl_->sum_alone(bucket_idx);
}

void Exchange::release() {
  {
    const std::scoped_lock lock(impl_->mutex);
    impl_->is_released = true;
  }
  impl_->for_summer.notify_all();
  if (impl_->size == 1) impl_->release_alone();
}

void Exchange::wait_summed() {
  if (impl_->size == 1) return;
  const Waiting waiting(*impl_, "the sums");
  std::unique_lock lock(impl_->mutex);
  impl_->for_step.wait(
      lock, [&] { return impl_->num_summed == impl_->order.size() || !impl_->failure.empty(); });
  impl_->check_failed();
}

void Exchange::wait(std::int32_t bucket_idx) {
  if (is_done(bucket_idx)) return;
  const Waiting waiting(*impl_, bucket_text(*impl_, bucket_idx));
  const PlanBucket& bucket = impl_->plan.buckets()[static_cast<std::size_t>(bucket_idx)];
  for (std::int32_t i = 0; i < bucket.num_pieces; ++i) {
    impl_->wait_gathered(bucket.first_piece_idx + i);
    impl_->wait_spread(bucket.first_piece_idx + i);
  }
}

bool Exchange::is_done(std::int32_t bucket_idx) const {
  const PlanBucket& bucket = impl_->plan.buckets()[static_cast<std::size_t>(bucket_idx)];
  const std::scoped_lock lock(impl_->mutex);
  impl_->check_failed();
  for (std::int32_t i = 0; i < bucket.num_pieces; ++i) {
    const std::int32_t piece_idx = bucket.first_piece_idx + i;
    const PieceState& piece = impl_->state(piece_idx);
    if (!piece.is_offered || !piece.is_gathered || !impl_->is_spread(piece_idx)) {
      return false;  // this rank's shard, and the others'
    }
  }
  return true;
}

std::int64_t Exchange::num_scattered() const {
  const std::scoped_lock lock(impl_->mutex);
  return static_cast<std::int64_t>(impl_->num_scattered);
}

void Exchange::wait_all() {
  if (impl_->size == 1) return;
  for (std::size_t bucket = 0; bucket < impl_->plan.buckets().size(); ++bucket) {
    wait(static_cast<std::int32_t>(bucket));
  }
  const auto is_sent = [&] {
    const auto is_one_sent = [](const auto& one) { return one.is_sent; };
    // Channels too: publish() must not wait for them, as it has no deadline.
    return std::all_of(impl_->states.begin(), impl_->states.end(), is_one_sent) &&
           std::all_of(impl_->channels.begin(), impl_->channels.end(), is_one_sent);
  };
  const Waiting waiting(*impl_, "the last bytes to leave");
  std::unique_lock lock(impl_->mutex);
  impl_->for_step.wait(lock, [&] { return is_sent() || !impl_->failure.empty(); });
  impl_->check_failed();
}

void Exchange::publish(std::int32_t channel_idx, std::span<const std::byte> bytes) {
  std::unique_lock lock(impl_->mutex);
  Channel& channel = impl_->channels[static_cast<std::size_t>(channel_idx)];
  impl_->for_step.wait(lock, [&] { return channel.is_sent || !impl_->failure.empty(); });
  impl_->check_failed();
  if (bytes.size() != channel.own.size()) {
    tradewind::fail(ErrorKind::kBadValue, "channel ", channel_idx, ": expected ",
                    channel.own.size(), " bytes, got ", bytes.size());
  }
  std::copy(bytes.begin(), bytes.end(), channel.own.begin());
  std::copy(bytes.begin(), bytes.end(),
            channel.received[static_cast<std::size_t>(impl_->rank)].begin());
  channel.is_published = true;
  if (impl_->size == 1) return;
  impl_->for_step.notify_all();
  channel.is_sent = false;
  impl_->publishing.push_back(channel_idx);
  impl_->for_sender.notify_all();
}

std::span<const std::byte> Exchange::published(std::int32_t channel_idx, int rank) {
  Channel& channel = impl_->channels[static_cast<std::size_t>(channel_idx)];
  if (impl_->size > 1 && !channel.is_received) {
    const Waiting waiting(*impl_, "what every rank says of its gradients");
    for (int peer = 0; peer < impl_->size; ++peer) {
      TransferPtr transfer;
      {
        const std::scoped_lock lock(impl_->mutex);
        impl_->check_failed();
        transfer = channel.receiving[static_cast<std::size_t>(peer)];
        impl_->missing_peer = peer;
      }
      if (!transfer) continue;
      impl_->or_fail([&] { impl_->wait_for(transfer, peer, "what it says of its gradients"); });
    }
    std::unique_lock lock(impl_->mutex);
    impl_->missing_peer = -1;
    impl_->for_step.wait(lock, [&] { return channel.is_published || !impl_->failure.empty(); });
    impl_->check_failed();
    channel.is_received = true;
  }
  return channel.received[static_cast<std::size_t>(rank)];
}

void Exchange::tell(std::string activity) {
  const std::scoped_lock lock(impl_->mutex);
  impl_->activity = std::move(activity);
}

void Exchange::fail_with(const std::string& reason) noexcept { impl_->fail(reason); }

Exchange::Statistics Exchange::statistics() const {
  const std::scoped_lock lock(impl_->mutex);
  return impl_->statistics;
}

std::span<std::vector<float>> Exchange::errors() { return impl_->errors; }

}  // namespace tradewind
