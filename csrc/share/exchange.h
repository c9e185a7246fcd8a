// The direct exchange of gradients in host memory. Of every piece each rank owns one shard: the
// others send theirs, it sums them in rank order, and sends the mean to all (or, where shards are
// updated by their owners, what the update made of it). The wire carries what a ring would, and the
// sums do not depend on timing. With neighbours the ranks of a host sum among themselves first, and
// only ranks of one place on different hosts trade shards (exchange_host.cpp).
//
// Threads: begin(), ready(), the waits and publish() belong to the thread that runs the step
// (ready(), tell() and fail_with() to any). A sender thread puts at most a window of bytes on the
// wire, most urgent first; a summing thread takes shards as they arrive; a watching thread looks
// after deadlines. All memory belongs to the caller and must outlive the Exchange.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "share/codec.h"
#include "share/hosts.h"
#include "share/neighbours.h"
#include "share/peers.h"
#include "share/plan.h"

namespace tradewind {

class Exchange {
 public:
  class Impl;

  struct Memory {
    const Layout* layout = nullptr;
    std::vector<std::byte*> arenas;  // one for each of the layout's
    // Where set, in place of the above: the address of a cut. What lies between two neighbouring
    // cuts is one run of memory.
    std::function<std::byte*(const Cut&)> place = nullptr;
  };

  struct Options {
    Codec codec = Codec::kNone;
    bool error_feedback = true;  // where the codec loses anything
    std::int64_t window_bytes = 1024 * 1024;
    // Where some buckets are more urgent than others: how far what this rank sends may be ahead of
    // what it receives. More would queue in the network, where nothing urgent can pass it.
    std::int64_t lead_bytes = 2 * 1024 * 1024;
    std::chrono::milliseconds patience{30'000};   // then a line says who is missing
    std::chrono::milliseconds deadline{300'000};  // then the wait ends in an error
    Hosts hosts;                                  // of no ranks: each rank has one of its own
    // The ranks of this rank's host, from meet_neighbours(); the gradients then lie in its arenas.
    // Null: all shards are traded with all ranks.
    std::shared_ptr<Neighbours> neighbours;
  };

  // What runs on the summing thread. Neither may throw or call the Exchange, but for publish().
  struct Callbacks {
    // The shard of a piece is summed, and nothing of it has been sent yet.
    std::function<void(std::int32_t piece_idx)> on_sum;
    // Where set, the Exchange sends the shard of `gathered` once this has made it of the mean; it
    // is called after release().
    std::function<void(std::int32_t piece_idx)> on_release;
    // All shards of this round are summed.
    std::function<void()> on_all_summed;
    // A line for the user: somebody is late.
    std::function<void(const std::string&)> on_late;
  };

  // `gathered`: what the second half spreads; the gradients themselves, unless on_release makes
  // something else of them. `channel_bytes[c][r]`: what rank r publishes on channel c each round.
  Exchange(const Plan& plan, Memory gradients, Memory gathered, std::shared_ptr<Peers> peers,
           std::shared_ptr<Board> board, const Options& options, Callbacks callbacks,
           std::vector<std::vector<std::int64_t>> channel_bytes);
  // Says goodbye first, for at most two seconds, so that nothing a peer still needs is lost.
  ~Exchange() noexcept;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The order in which buckets are sent, the same on all ranks; from the next begin() on.
  // `urgency` (by bucket, small is urgent; may be empty): what goes first once it is summed.
  void set_order(std::vector<std::int32_t> buckets, std::vector<std::int32_t> urgency);

  // Starts a round; the mean is taken over `num_contributors`. Waits for what is left of the last.
  void begin(std::int64_t num_contributors);
  // The bucket's gradients lie in their arena, and stay untouched until wait().
  void ready(std::int32_t bucket_idx);
  // Lets on_release run.
  void release();
  void wait_summed();
  // The bucket's memory holds the result.
  void wait(std::int32_t bucket_idx);
  // Of all buckets, and nothing of this rank's memory is still to be sent.
  void wait_all();
  [[nodiscard]] bool is_done(std::int32_t bucket_idx) const;
  // Pieces of this round whose first half has been put on the wire.
  [[nodiscard]] std::int64_t num_scattered() const;

  // Sends these bytes to every rank, ahead of everything else.
  void publish(std::int32_t channel, std::span<const std::byte> bytes);
  // What a rank published this round; valid until the next begin().
  std::span<const std::byte> published(std::int32_t channel, int rank);

  // What this rank is doing, for the others' errors.
  void tell(std::string activity);
  // Ends the exchange on every rank; calls under way and later ones throw this.
  void fail_with(const std::string& reason) noexcept;

  struct Statistics {
    std::int64_t num_rounds = 0;
    std::int64_t sent_bytes = 0;
    std::int64_t between_hosts_bytes = 0;  // of those
    double waited_s = 0.0;                 // of the step's thread
    double busy_s = 0.0;  // from a round's first byte to its last, over rounds that have ended
  };
  [[nodiscard]] Statistics statistics() const;

  // Error feedback, for checkpoints: one float32 a value of each arena; empty where there is none.
  [[nodiscard]] std::span<std::vector<float>> errors();

 private:
  std::unique_ptr<Impl> impl_;
};

// What Options::neighbours takes, for an exchange of this plan: collective among the ranks of a
// host. `sockets`: by rank, see HostLinks. Throws as Neighbours does; Error(kBadValue) unless every
// host has as many ranks.
std::shared_ptr<Neighbours> meet_neighbours(const Layout& layout, const Plan& plan,
                                            const Hosts& hosts,
                                            const std::vector<std::string>& sockets, int rank,
                                            Deadline deadline);

}  // namespace tradewind
