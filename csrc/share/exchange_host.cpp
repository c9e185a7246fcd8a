// Ranks of one host, before and after their shards travel. A rank of place p sums, over the ranks
// of its host, the shards of all ranks of place p; trades these sums with the other hosts' place p,
// as ranks without neighbours trade values; and writes the means that it then has into its
// neighbours' arenas. Between a rank's announcement that a bucket is ready and its neighbours' that
// they have spread a piece, each of the piece's shards is so read and written by the ranks of one
// place alone: in this host, by one rank. Words: a bucket's, then a piece's, is the round that it
// is done for.
#include <cstring>
#include <exception>
#include <utility>

#include "base/error.h"
#include "share/exchange_impl.h"

namespace tradewind {

std::shared_ptr<Neighbours> meet_neighbours(const Layout& layout, const Plan& plan,
                                            const Hosts& hosts,
                                            const std::vector<std::string>& sockets, int rank,
                                            Deadline deadline) {
  if (!hosts.is_even() || hosts.num_ranks() != plan.world_size()) {
    fail(ErrorKind::kBadValue, "hosts: expected as many ranks on each of ", hosts.num_hosts(), ", ",
         plan.world_size(), " in all; use strategy=\"allreduce\"");
  }
  if (static_cast<int>(sockets.size()) != hosts.num_ranks()) {
    fail(ErrorKind::kBadValue, "sockets: expected one for each of ", hosts.num_ranks(),
         " ranks, got ", sockets.size());
  }
  HostLinks::Options options;
  options.ranks = hosts.ranks_of(hosts.host_of(rank));
  options.own_place = hosts.place_of(rank);
  options.deadline = deadline;
  for (const int one : options.ranks) {
    options.names.push_back(sockets[static_cast<std::size_t>(one)]);
  }
  std::vector<std::int64_t> arena_bytes;
  for (const ArenaSpec& arena : layout.arenas()) arena_bytes.push_back(arena.size_bytes);
  const auto num_words = static_cast<std::int64_t>(plan.buckets().size() + plan.pieces().size());
  return std::make_shared<Neighbours>(std::move(options), arena_bytes, num_words);
}

namespace {

std::int64_t piece_word(const Exchange::Impl& exchange, std::int32_t piece_idx) {
  return static_cast<std::int64_t>(exchange.plan.buckets().size()) + piece_idx;
}

// A rank of this host whose word has not come to this round, -1 for none.
int behind(const Exchange::Impl& exchange, std::int64_t word_idx) {
  const Neighbours& neighbours = *exchange.options.neighbours;
  const auto round = static_cast<std::uint64_t>(exchange.statistics.num_rounds);
  for (int place = 0; place < neighbours.num_places(); ++place) {
    if (place == neighbours.own_place()) continue;
    if (neighbours.word(place, word_idx) < round) return neighbours.rank_at(place);
  }
  return -1;
}

constexpr const char* kGone = "its process has ended, or has given up sharing";

}  // namespace

// --- what is read and written --------------------------------------------------------------------

// Half sums of 16-bit values would overflow where their mean does not: of them, the means of hosts
// travel.
double Exchange::Impl::host_divisor(DType dtype) const {
  const bool is_wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
  return is_wide ? 1.0 : static_cast<double>(options.neighbours->num_places());
}

void Exchange::Impl::sum_on_host(std::int32_t piece_idx, int shard, double divisor) {
  const PieceMemory& piece = memory(piece_idx);
  std::byte* own = piece.shard(shard);
  std::vector<SumPart> parts;
  // SAFETY: the neighbours said that these are there, and leave them alone until they are spread.
  for (std::byte* values : piece.neighbours) parts.push_back({values + (own - piece.values), true});
  kernels.sum[static_cast<int>(Codec::kNone)][static_cast<int>(piece.dtype)](
      parts.data(), static_cast<std::int64_t>(parts.size()), piece.shard_elements(shard), divisor,
      own);
}

void Exchange::Impl::spread(std::int32_t piece_idx, int shard) const {
  const PieceMemory& piece = memories[static_cast<std::size_t>(piece_idx)];
  const std::byte* own = piece.shard(shard);
  const auto num_bytes =
      static_cast<std::size_t>(piece.shard_elements(shard) * element_bytes(piece.dtype));
  for (std::byte* values : piece.neighbours) {
    if (values != piece.values) std::memcpy(values + (own - piece.values), own, num_bytes);
  }
}

void Exchange::Impl::note_spread(std::int32_t piece_idx) {
  constexpr int kNumKinds = 2;  // see PieceState
  std::int64_t round = 0;
  {
    const std::scoped_lock lock(mutex);
    if (++state(piece_idx).num_spread < kNumKinds) return;
    round = statistics.num_rounds;
  }
  options.neighbours->announce(piece_word(*this, piece_idx), static_cast<std::uint64_t>(round));
}

// --- what is waited for --------------------------------------------------------------------------

bool Exchange::Impl::is_ready_on_host(std::int32_t bucket_idx) const {
  if (!is_ready[static_cast<std::size_t>(bucket_idx)]) return false;
  return !options.neighbours || behind(*this, bucket_idx) < 0;
}

bool Exchange::Impl::is_spread(std::int32_t piece_idx) const {
  if (!options.neighbours) return true;
  return states[static_cast<std::size_t>(piece_idx)].is_offered && owing_neighbour(piece_idx) < 0;
}

void Exchange::Impl::wait_spread(std::int32_t piece_idx) {
  if (!options.neighbours) return;
  std::unique_lock lock(mutex);
  for_step.wait(lock, [&] {
    missing_peer = owing_neighbour(piece_idx);
    return is_spread(piece_idx) || !failure.empty();
  });
  check_failed();
}

int Exchange::Impl::owing_neighbour(std::int32_t piece_idx) const {
  return behind(*this, piece_word(*this, piece_idx));
}

int Exchange::Impl::unready_neighbour() const {
  if (!options.neighbours || num_summed >= order.size()) return -1;
  const std::int32_t piece_idx = order[num_summed];
  return behind(*this, plan.pieces()[static_cast<std::size_t>(piece_idx)].bucket_idx);
}

int Exchange::Impl::lost_neighbour() const {
  const Neighbours& neighbours = *options.neighbours;
  const auto round = static_cast<std::uint64_t>(statistics.num_rounds);
  for (int place = 0; place < neighbours.num_places(); ++place) {
    if (place == neighbours.own_place() || !neighbours.is_gone(place)) continue;
    for (const std::int32_t piece_idx : order) {
      if (neighbours.word(place, piece_word(*this, piece_idx)) < round) {
        return neighbours.rank_at(place);
      }
    }
  }
  return -1;
}

void Exchange::Impl::check_neighbours() {
  if (!options.neighbours) return;
  for (int place = 0; place < options.neighbours->num_places(); ++place) {
    if (place == options.neighbours->own_place() || !options.neighbours->is_gone(place)) continue;
    fail(lost(options.neighbours->rank_at(place), "its gradients", kGone));
    const std::scoped_lock lock(mutex);
    check_failed();
  }
}

// Hears the neighbours, and wakes only who can go on.
void Exchange::Impl::run_host() {
  try {
    while (options.neighbours->wait()) {
      int lost_rank = -1;
      {
        const std::scoped_lock lock(mutex);
        const auto is_next = [&](std::size_t position) {
          if (position >= order.size()) return false;
          const auto piece_idx = static_cast<std::size_t>(order[position]);
          return is_ready_on_host(plan.pieces()[piece_idx].bucket_idx);
        };
        if (is_next(num_scattered)) for_sender.notify_all();
        if (is_next(num_summed)) for_summer.notify_all();
        if (is_waiting) for_step.notify_all();
        lost_rank = lost_neighbour();
      }
      if (lost_rank >= 0) fail(lost(lost_rank, "its part of a sum", kGone));
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

}  // namespace tradewind
