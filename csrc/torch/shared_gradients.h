// The gradients of a model, shared between ranks: hooks take each into its bucket while backward
// runs, full buckets travel, and `.grad` holds the mean when the round is settled. Parameters that
// a backward did not reach count as zero; those that no rank reached keep what they had.
//
// A round is: hooks of one backward (or of several, the last with set_syncing(true)) ->
// finish_backward() -> settle(). All methods belong to the thread that runs the step; hooks may
// fire on any.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "share/exchange.h"
#include "share/low_rank.h"
#include "torch/gradient_hooks.h"
#include "torch/mean_measures.h"
#include "torch/optimizer_table.h"
#include "torch/round_facts.h"
#include "torch/zeroed_memory.h"

namespace tradewind {

class HotMeasure;

class SharedGradients {
 public:
  struct Options {
    PlanOptions plan;
    Exchange::Options exchange;
    // Sum microbatches in the bucket (16-bit ones in float32) and drop `.grad` after each.
    bool sums_microbatches = false;
    // Ranks measure the mean for each other, for give_measures().
    bool measures = false;
    // Hooks finish and settle the round themselves when their backward ends.
    bool settles_itself = false;
    // Every rank updates its shard alone, and the other half of a round spreads parameters: after
    // set_shards(), release() takes the place of settle()'s means.
    bool shards_update = false;
    // Above 0: matrices travel as products of two thin ones of this rank (PowerSGD), everything
    // else as exchange.codec has it. Not with shards_update, nor settle_bucket().
    std::int64_t low_rank = 0;
    // Of the model: those of rank 0 travel with every round, for take_buffers().
    std::vector<at::Tensor> buffers;
    // By rank, or empty: where the ranks of one of exchange.hosts meet, to sum among themselves
    // first (meet_neighbours()).
    std::vector<std::string> sockets;
    std::function<void(const std::string&)> on_late;
    // Throws the error as something that torch's autograd hands to Python in its own type.
    std::function<void(const Error&)> throw_through_autograd;
  };

  // A gradient that is not finite on one rank, before it was summed with the others'.
  struct NonFinite {
    int rank;
    std::string parameter_name;
    std::int64_t microbatch;  // from 1, of those since the last round
    std::int64_t num_parameters;
  };

  // Throws Error naming a parameter that cannot be shared. Frozen parameters have no bucket.
  SharedGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                  std::shared_ptr<Peers> peers, std::shared_ptr<Board> board,
                  const Options& options);
  ~SharedGradients();
  SharedGradients(const SharedGradients&) = delete;
  SharedGradients& operator=(const SharedGradients&) = delete;

  void install_hooks() { hooks_->install(); }
  void remove_hooks() noexcept { hooks_->remove(); }
  // From the first node of a backward, of the outermost one where they are nested: with
  // settles_itself, its end finishes and settles the round, or, unless it syncs, counts a
  // microbatch.
  void open_backward(bool syncs);
  // A backward was opened and did not come to its end.
  [[nodiscard]] bool is_backward_open() const { return is_backward_open_; }
  // Whether the next backward ends a round.
  void set_syncing(bool is_syncing) { is_syncing_ = is_syncing; }
  [[nodiscard]] bool is_syncing() const { return is_syncing_; }
  // A backward that does not sync has ended.
  void end_microbatch() { ++num_microbatches_; }

  // Every gradient of this backward is there. `has_next`: this rank will take part in another
  // round.
  void finish_backward(bool has_next = true);
  // A round of a rank that has no data left.
  void shadow_round(bool has_next = true);
  [[nodiscard]] bool is_open() const { return is_begun_; }
  // Whether the mean is over all ranks (DistributedDataParallel's default for uneven inputs) or, as
  // it is here, over those that took part.
  void set_divide_by_all(bool divides_by_all) { divides_by_all_ = divides_by_all; }
  // Waits for the round and sets `.grad`.
  void settle();
  // Gives up an unfinished backward (it raised): its gradients are forgotten. Once a bucket has
  // been sent there is no way back for the other ranks, and the exchange ends.
  void abandon(const std::string& reason);

  // --- before settle(), once finish_backward() has run ---
  // Gradients that are not finite, of all ranks, and how many ranks go on after this round.
  const std::vector<NonFinite>& nonfinite();
  std::int64_t num_contributors_next();
  // The bucket of a parameter; -1 for frozen ones.
  [[nodiscard]] std::int32_t bucket_of(std::size_t idx) const;
  [[nodiscard]] std::vector<std::int64_t> parameters_of(std::int32_t bucket_idx) const;
  // Whether means are as they arrive: every rank that was counted took part.
  bool is_mean_final();
  // `.grad` of every parameter is where its mean will be.
  void assign_gradients();
  // Waits for one bucket's means.
  void settle_bucket(std::int32_t bucket_idx);
  // While an update waits for its means, no other backward may arrive.
  void set_deferred(bool is_deferred) { is_deferred_ = is_deferred; }
  // Multiplies what this rank has summed of an unfinished round.
  void scale(double factor);
  // Gives the means' measures to `hot`, as if they had been taken there; `hot_idx_of` a parameter
  // is its index there, or -1.
  void give_measures(HotMeasure& hot, const std::vector<std::int64_t>& hot_idx_of);

  // Rank 0's buffers as they were when its last round ended; once a round, on every other rank.
  void take_buffers();
  // What a lossy codec still owes, by name: for checkpoints of this rank, between rounds.
  struct Feedback {
    std::string name;
    std::span<float> values;
  };
  std::vector<Feedback> feedback();
  // Counts every parameter as used in this round, whatever backward reached.
  void use_all() { std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{1}); }

  // --- with shards_update ---
  // A run of a parameter's elements, as they lie in memory, that this rank updates.
  struct Fragment {
    std::int32_t piece_idx;
    std::int64_t parameter_idx;
    std::int64_t begin, end;
  };
  [[nodiscard]] const std::vector<Fragment>& fragments() const { return fragments_; }
  // The table that updates fragments, and each one's parameter there. It outlives this object, or
  // its last release().
  void set_shards(OptimizerTable& table, std::vector<std::size_t> table_idx_of_fragment);
  // This round's update: from now on shards are swept as their sums are there, on a thread of the
  // exchange, and spread. Where it is vetoed, parameters are spread as they are.
  void release(std::vector<GroupOptions> groups, double gradient_multiplier, bool is_vetoed);

  // In which order the next forward needs parameters: what is needed sooner is sent first.
  void set_forward_order(const std::vector<std::int64_t>& parameters);

  // The mean of a parameter that has a slot, whatever its `.grad` is.
  [[nodiscard]] at::Tensor mean(std::size_t idx) const { return views_[idx]; }
  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] Exchange& exchange() { return *exchange_; }
  [[nodiscard]] std::int64_t memory_bytes() const;

 private:
  void check_codec(DType dtype, const std::string& name) const;
  void make_layout();
  void make_view(std::size_t idx);
  void find_fragments();
  [[nodiscard]] ZeroedMemory allocate_arena(std::int64_t size_bytes) const;
  template <class Body>
  void under_autograd(const Body& body);
  void check_weights(int rank, const RoundFacts& facts);
  [[nodiscard]] std::uint32_t num_changes() const;
  [[nodiscard]] std::uint64_t weights_digest() const;
  void arrive(std::size_t idx);
  void close_backward();
  void begin();
  void take_in(std::size_t idx);
  void zero(std::size_t idx);
  void fill_missing(std::size_t idx);
  void count_in(std::size_t idx);
  void zero_gap_behind(std::int64_t slot_idx);
  void count_slot(std::int64_t slot_idx);
  void assign(std::size_t idx);
  [[nodiscard]] double mean_factor() const;
  void publish_facts(bool has_next, bool is_present);
  void read_facts();
  void publish_buffers();
  void update_piece(std::int32_t piece_idx);
  [[nodiscard]] std::byte* address_of(const Cut& cut) const;
  [[nodiscard]] std::unique_ptr<LowRankMatrix> make_thin(std::size_t idx) const;
  [[nodiscard]] float* slot_data(std::int64_t slot_idx) const;
  void project(std::size_t idx);
  void turn_thin();
  void rebuild_thin(double mean_factor);
  [[nodiscard]] std::size_t parameter_at(std::int64_t slot_idx) const {
    return parameter_of_[static_cast<std::size_t>(slot_idx - num_right_)];
  }
  [[nodiscard]] std::vector<std::int32_t> next_order() const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  Options options_;
  int rank_ = 0;
  Layout layout_;
  Plan plan_;
  std::vector<std::int64_t> slot_of_;      // by parameter; -1 where frozen
  std::vector<std::size_t> parameter_of_;  // by slot, of those that are not right ones
  std::vector<ZeroedMemory> arenas_;
  std::vector<std::byte*> arena_data_;
  std::vector<at::Tensor> views_;  // by parameter
  // By parameter: null, or -1, where it travels whole.
  std::vector<std::unique_ptr<LowRankMatrix>> thin_;
  std::vector<std::int64_t> right_slot_of_;
  std::int64_t num_right_ = 0;

  std::mutex mutex_;
  bool is_syncing_ = true;
  bool is_backward_open_ = false;
  bool is_begun_ = false;
  bool is_finished_ = false;
  bool is_deferred_ = false;
  bool is_shadow_ = false;             // this rank has no data in this round
  std::int64_t num_microbatches_ = 0;  // before this one, since the last round
  std::vector<std::uint8_t> is_used_, is_taken_, is_assigned_;  // by parameter
  std::vector<std::int32_t> num_arrived_, num_expected_;
  bool knows_expected_ = false;
  std::vector<std::int64_t> num_missing_;  // by bucket: slots not taken in yet
  std::vector<std::int32_t> arrivals_;     // buckets in the order in which they became full
  std::vector<std::int64_t> slot_arrivals_;
  std::vector<at::Tensor> kept_;            // by parameter: what a locally unused one had
  std::vector<std::int32_t> forward_rank_;  // by bucket; empty without set_forward_order()
  std::int64_t num_ahead_ = 0;

  std::int64_t first_nonfinite_ = -1;  // of this rank
  std::int64_t nonfinite_microbatch_ = 0;
  std::int64_t num_nonfinite_ = 0;
  std::vector<std::uint8_t> is_nonfinite_;
  bool has_facts_ = false;
  bool has_buffers_ = true;
  std::vector<NonFinite> all_nonfinite_;
  std::vector<std::uint8_t> is_used_anywhere_;
  std::int64_t num_contributors_ = 1, num_contributors_next_ = 1, num_present_ = 1;
  bool divides_by_all_ = false;
  std::vector<std::uint32_t> num_changes_of_;  // by rank, in the last round
  int first_present_ = -1;                     // of the ranks that took part in this round
  std::uint32_t num_changed_first_ = 0;        // its changes since the round before
  std::uint64_t digest_of_first_ = 0;          // of its weights, where compared
  bool compares_weights_ = false;              // in this round
  bool compares_next_ = false;

  std::vector<Fragment> fragments_;
  std::vector<std::vector<std::size_t>> fragments_of_;  // by piece
  OptimizerTable* shard_table_ = nullptr;
  std::vector<std::size_t> table_idx_of_fragment_;
  std::vector<GroupOptions> release_groups_;
  double release_multiplier_ = 1.0;
  bool is_vetoed_ = false;
  std::string update_error_;

  std::unique_ptr<MeanMeasures> measures_;

  std::unique_ptr<Exchange> exchange_;
  // Last, so that no hook finds the rest gone.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace tradewind
