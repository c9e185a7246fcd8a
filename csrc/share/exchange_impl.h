// The inside of Exchange, shared by its units: exchange.cpp (the step's thread), exchange_send.cpp,
// exchange_sum.cpp, exchange_gather.cpp, exchange_host.cpp and exchange_watch.cpp (one thread
// each). `mutex` guards everything but what is fixed after construction; it is never held while a
// transfer is waited for or made.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "share/exchange.h"
#include "share/kernels.h"

namespace tradewind {

using Clock = std::chrono::steady_clock;
using TransferPtr = std::shared_ptr<Transfer>;

// What travels of one piece, fixed after construction.
struct PieceMemory {
  std::byte* values = nullptr;  // of the piece, in the gradient arena
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> value_offsets;  // world_size + 1, in elements from `values`
  // Where each rank's shard lies in the second half: in the gathered arena, or encoded.
  std::vector<std::byte*> gathered;
  std::vector<std::int64_t> gathered_bytes;
  // Encoded shards, each rank's; null without a codec.
  std::vector<std::byte*> wire;
  std::vector<std::byte*> neighbours;  // `values` of each place of this host; empty without
  float* error = nullptr;              // of the piece, like values; null without error feedback
  std::vector<std::byte*> staging;     // what each rank sends of this rank's shard; null where none

  [[nodiscard]] std::int64_t shard_elements(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return value_offsets[r + 1] - value_offsets[r];
  }
  [[nodiscard]] std::byte* shard(int rank) const {
    return values + value_offsets[static_cast<std::size_t>(rank)] * element_bytes(dtype);
  }
  [[nodiscard]] float* shard_error(int rank) const {
    return error == nullptr ? nullptr : error + value_offsets[static_cast<std::size_t>(rank)];
  }
};

struct PieceState {
  bool is_summed = false;
  bool is_offered = false;  // its gather may be sent
  bool is_sent = false;     // its gather has left
  bool is_claimed = false;  // somebody is gathering it
  bool is_gathered = false;
  std::vector<TransferPtr> staging, gathering;  // by rank, null for itself
  // Kinds of shards that this rank has given its neighbours: its own, and those that it traded.
  int num_spread = 0;
};

struct Channel {
  std::vector<std::vector<std::byte>> received;  // by rank
  std::vector<std::byte> own;
  std::vector<TransferPtr> receiving;
  bool is_published = false;  // by this rank, in this round
  bool is_sent = true;
  bool is_received = false;
};

class Exchange::Impl {
 public:
  Impl(const Plan& plan, Memory gradients, Memory gathered, std::shared_ptr<Peers> peers,
       std::shared_ptr<Board> board, const Options& options, Callbacks callbacks,
       std::vector<std::vector<std::int64_t>> channel_bytes);
  ~Impl() noexcept;

  // exchange_send.cpp
  struct Item {
    enum class Kind : std::uint8_t { kNone, kScatter, kGather, kPublish };
    Kind kind = Kind::kNone;
    std::int32_t idx = 0;  // of the piece or channel
  };
  struct Sent {
    int peer;
    TransferPtr transfer;
  };
  struct UnderWay {
    Item item;
    std::int64_t size_bytes = 0;
    std::int64_t between_hosts_bytes = 0;
    std::vector<Sent> transfers;
  };
  // Until no save needs the memory that others will write what they make of this piece into.
  void wait_for_gate(const PieceMemory& piece) const;
  void run_sender();
  [[nodiscard]] bool is_too_far_ahead();
  [[nodiscard]] Item choose() const;
  [[nodiscard]] UnderWay start(const Item& item);
  void finish(const UnderWay& done);

  // exchange_sum.cpp
  void run_summer();
  void sum(std::int32_t piece_idx);
  // In place of the summing thread, where there is one rank.
  void sum_alone(std::int32_t bucket_idx);
  void release_alone();
  void offer_alone(std::int32_t piece_idx);
  void offer(std::int32_t piece_idx);
  void encode_mean(std::int32_t piece_idx);
  // What the others send of this rank's shard.
  [[nodiscard]] std::int64_t staged_bytes(std::int32_t piece_idx);

  // exchange_gather.cpp
  void run_gatherer();
  [[nodiscard]] bool gather(std::int32_t piece_idx, int& waits_for);
  [[nodiscard]] int urgency_of(std::int32_t piece_idx) const;
  // With the mutex held: this piece's shards may come from now on.
  void expect(std::int32_t piece_idx);

  // exchange_host.cpp
  void run_host();
  // values of a shard here = those of all ranks of this host, in rank order, summed and divided.
  void sum_on_host(std::int32_t piece_idx, int shard, double divisor);
  [[nodiscard]] double host_divisor(DType dtype) const;
  // Gives the shard to the neighbours; then that one of the two kinds has been given.
  void spread(std::int32_t piece_idx, int shard) const;
  void note_spread(std::int32_t piece_idx);
  // With the mutex held: this rank, and its neighbours, have the bucket's gradients.
  [[nodiscard]] bool is_ready_on_host(std::int32_t bucket_idx) const;
  // With the mutex held: this piece's parts have been given, by this rank and to it.
  [[nodiscard]] bool is_spread(std::int32_t piece_idx) const;
  void wait_spread(std::int32_t piece_idx);
  // Throws where a neighbour is gone.
  void check_neighbours();
  // With the mutex held: a rank whose part in the next sum, or of a piece, is missing; -1 for none.
  [[nodiscard]] int unready_neighbour() const;
  [[nodiscard]] int owing_neighbour(std::int32_t piece_idx) const;
  // With the mutex held: one that is gone, and has left this round undone; -1 for none.
  [[nodiscard]] int lost_neighbour() const;

  // exchange_watch.cpp
  void run_watcher();
  void look_after_wait(std::optional<Clock::time_point>& warned_of);
  [[nodiscard]] std::string describe_late(std::chrono::milliseconds waited);
  void fail(const std::string& reason) noexcept;
  // The cause of a transfer's failure, with what the peer said last.
  [[nodiscard]] std::string lost(int peer, const std::string& doing, const std::string& error);
  void tear_down() noexcept;
  // Drops all transfers, then the connections: these close once nobody holds any of them, and what
  // was given up is not written to any more.
  void let_go() noexcept;
  // Of all threads, without a goodbye.
  void end() noexcept;

  // exchange.cpp
  void connect();
  void lay_out(const Exchange::Memory& gradients, const Exchange::Memory& gathered);
  // Throws once the exchange has failed. They may be gone, so nobody uses `peers` without.
  [[nodiscard]] std::shared_ptr<Peers> connections() const;
  [[nodiscard]] TransferPtr receive(std::byte* data, std::int64_t size_bytes, int peer,
                                    std::uint32_t tag);
  void post_staging(std::int32_t piece_idx);
  void post_gathering(std::int32_t piece_idx);
  void post_channel(std::int32_t channel_idx);
  void keep(std::vector<TransferPtr>& where, std::vector<TransferPtr> made);
  // False where it was interrupted.
  [[nodiscard]] bool wait_once(const TransferPtr& transfer, int peer, const std::string& doing);
  void wait_for(const TransferPtr& transfer, int peer, const std::string& doing);
  void wait_gathered(std::int32_t piece_idx);
  void wake_all() noexcept {
    for (auto* sleepers : {&for_step, &for_sender, &for_summer, &for_gatherer, &for_watcher}) {
      sleepers->notify_all();
    }
  }
  void check_failed() const;  // with the mutex held
  // What a call on the step's thread throws ends the exchange.
  template <class Call>
  void or_fail(const Call& call) {
    try {
      call();
    } catch (const std::exception& error) {
      fail(error.what());
      const std::scoped_lock lock(mutex);
      check_failed();
      throw;
    }
  }

  [[nodiscard]] PieceMemory& memory(std::int32_t piece_idx) {
    return memories[static_cast<std::size_t>(piece_idx)];
  }
  [[nodiscard]] PieceState& state(std::int32_t piece_idx) {
    return states[static_cast<std::size_t>(piece_idx)];
  }
  [[nodiscard]] bool is_own(int peer) const { return peer == rank; }
  // Whether shards travel between this rank and that.
  [[nodiscard]] bool trades_with(int peer) const {
    return options.neighbours ? hosts.are_opposite(rank, peer) : !is_own(peer);
  }
  [[nodiscard]] int num_traders() const {
    return (options.neighbours ? hosts.num_hosts() : size) - 1;
  }
  [[nodiscard]] bool spreads_means() const { return !callbacks.on_release; }
  [[nodiscard]] bool is_lossy() const { return options.codec != Codec::kNone; }

  const Plan& plan;
  const Options options;
  const Callbacks callbacks;
  const std::shared_ptr<Board> board;
  const int rank;
  const int size;
  const Hosts hosts;
  const ShareKernels& kernels;
  std::vector<PieceMemory> memories;
  std::vector<std::vector<float>> errors;                    // by arena
  std::vector<std::unique_ptr<std::byte[]>> staging_memory;  // one allocation a piece
  std::vector<std::unique_ptr<std::byte[]>> wire_memory;

  mutable std::mutex mutex;
  std::mutex alone;  // one callback at a time, where there is one rank and no summing thread
  // What each thread sleeps on: waking all for everything costs more than what is shared.
  std::condition_variable for_step, for_sender, for_summer, for_gatherer, for_watcher;
  std::shared_ptr<Peers> peers;  // dropped when the exchange has failed
  std::string failure;
  bool is_closing = false;
  int num_live_threads = 0;

  std::vector<std::int32_t> order, next_order;      // pieces
  std::vector<std::int32_t> urgency, next_urgency;  // by bucket
  std::int64_t num_contributors = 1;
  bool is_released = false;
  std::vector<bool> is_ready;  // by bucket
  std::vector<PieceState> states;
  std::size_t num_scattered = 0, num_summed = 0;  // of `order`
  std::vector<std::int32_t> held;                 // summed, not released yet
  std::vector<std::int32_t> offered;              // gathers to be sent
  std::vector<std::int32_t> expected;             // gathers that may come, not claimed
  std::int32_t gathering_piece = -1;              // what the gathering thread waits for
  TransferPtr gathering_transfer;
  bool is_in_the_way = false;  // something more urgent is expected meanwhile
  std::int64_t started_bytes = 0, received_bytes = 0;  // of this round
  Clock::time_point last_progress;
  Clock::time_point round_began, round_ended;
  std::int64_t lead_bytes = 0;
  std::deque<std::int32_t> publishing;
  std::vector<TransferPtr> sending;
  std::vector<Channel> channels;  // the last one is the goodbye
  Statistics statistics;

  // What the step's thread waits for, for the watcher.
  bool is_waiting = false;
  Clock::time_point waiting_since;
  std::string waiting_for;
  int missing_peer = -1;         // whom it waits for
  int summer_missing_peer = -1;  // whom the summing thread waits for
  std::string activity = "starting";
  std::optional<Clock::time_point> goodbye_until;
  std::vector<std::thread> threads;
};

}  // namespace tradewind
