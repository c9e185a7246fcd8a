// The gradients of a model on the CPU, shared between ranks by point-to-point messages: an Exchange
// sends each bucket as soon as it is full, and hands means back bucket by bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "share/exchange.h"
#include "share/low_rank.h"
#include "torch/gradient_rounds.h"
#include "torch/mean_measures.h"
#include "torch/optimizer_table.h"

namespace tradewind {

class HotMeasure;

class SharedGradients final : public GradientRounds {
 public:
  struct Options : GradientRounds::Options {
    Exchange::Options exchange;
    // Ranks measure the mean for each other, for give_measures().
    bool measures = false;
    // Every rank updates its shard alone, and the other half of a round spreads parameters: after
    // set_shards(), release() takes the place of settle()'s means.
    bool shards_update = false;
    // Above 0: matrices travel as products of two thin ones of this rank (PowerSGD), everything
    // else as exchange.codec has it. Not with shards_update, nor settle_bucket().
    std::int64_t low_rank = 0;
    // By rank, or empty: where the ranks of one of exchange.hosts meet, to sum among themselves
    // first (meet_neighbours()).
    std::vector<std::string> sockets;
  };

  // Throws Error naming a parameter that cannot be shared. Frozen parameters have no bucket.
  SharedGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                  std::shared_ptr<Peers> peers, std::shared_ptr<Board> board,
                  const Options& options);
  ~SharedGradients() override;

  const std::vector<NonFinite>& nonfinite() override;
  void take_buffers() override;
  std::map<std::string, at::Tensor> feedback() override;
  Exchange::Statistics statistics() override { return exchange_->statistics(); }
  void tell(std::string activity) override { exchange_->tell(std::move(activity)); }
  void fail_with(const std::string& reason) noexcept override { exchange_->fail_with(reason); }
  void leave(const std::string& text) override { exchange_->tell(text); }

  // --- before settle(), once finish_backward() has run ---
  // Whether means are as they arrive: every rank that was counted took part.
  bool is_mean_final();
  // `.grad` of every parameter is where its mean will be.
  void assign_gradients();
  // Waits for one bucket's means.
  void settle_bucket(std::int32_t bucket_idx);
  // While an update waits for its means, no other backward may arrive.
  void set_deferred(bool is_deferred) { is_deferred_ = is_deferred; }
  // Gives the means' measures to `hot`, as if they had been taken there; `hot_idx_of` a parameter
  // is its index there, or -1.
  void give_measures(HotMeasure& hot, const std::vector<std::int64_t>& hot_idx_of);

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

 private:
  void expect_usable() override;
  void begin_round() override;
  void ingest(std::size_t idx, at::Tensor gradient, bool overwrites) override;
  void zero(std::size_t idx) override;
  void count_in(std::size_t idx) override;
  void publish(RoundFacts facts) override;
  RoundFacts facts_of(int rank) override;
  void take_facts(int rank, RoundFacts& facts) override;
  void settle_round() override;
  void end_round() override;
  void assign(std::size_t idx) override;

  [[nodiscard]] Layout make_layout();
  void make_thin_view(std::size_t idx);
  void find_fragments();
  [[nodiscard]] ZeroedMemory allocate_arena(std::int64_t size_bytes) const;
  void zero_gap_behind(std::int64_t slot_idx);
  void count_slot(std::int64_t slot_idx);
  void publish_buffers();
  void update_piece(std::int32_t piece_idx);
  [[nodiscard]] std::byte* address_of(const Cut& cut) const;
  [[nodiscard]] std::unique_ptr<LowRankMatrix> make_thin(std::size_t idx) const;
  [[nodiscard]] float* slot_data(std::int64_t slot_idx) const;
  void project(std::size_t idx);
  void turn_thin();
  void rebuild_thin(double mean_factor);
  [[nodiscard]] std::vector<std::int32_t> next_order() const;

  Options options_;
  std::vector<std::byte*> arena_data_;
  // By parameter: null, or -1, where it travels whole.
  std::vector<std::unique_ptr<LowRankMatrix>> thin_;
  std::vector<std::int64_t> right_slot_of_;

  bool is_deferred_ = false;
  std::vector<std::uint8_t> is_assigned_;   // by parameter
  std::vector<std::int32_t> forward_rank_;  // by bucket; empty without set_forward_order()
  std::int64_t num_ahead_ = 0;

  std::int64_t first_nonfinite_ = -1;  // of this rank
  std::int64_t nonfinite_microbatch_ = 0;
  std::int64_t num_nonfinite_ = 0;
  std::vector<std::uint8_t> is_nonfinite_;
  bool has_buffers_ = true;
  std::vector<NonFinite> all_nonfinite_;
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
};

}  // namespace tradewind
