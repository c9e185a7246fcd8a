// Rounds in which ranks share their gradients, whoever carries them: hooks take each gradient into
// its bucket while backward runs, ranks say what they used, and `.grad` holds the mean when the
// round is settled. Parameters that a backward did not reach count as zero; those that no rank
// reached keep what they had.
//
// A round is: hooks of one backward (or of several, the last with set_syncing(true)) ->
// finish_backward() -> settle(). All methods belong to the thread that runs the step, but tell(),
// fail_with() and leave(), which any thread may call; hooks may fire on any.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "share/exchange.h"
#include "share/plan.h"
#include "torch/gradient_hooks.h"
#include "torch/round_facts.h"
#include "torch/weight_comparison.h"
#include "torch/zeroed_memory.h"

namespace tradewind {

class GradientRounds {
 public:
  struct Options {
    PlanOptions plan;
    // Sum microbatches in the bucket (16-bit ones in float32) and drop `.grad` after each.
    bool sums_microbatches = false;
    // Hooks finish and settle the round themselves when their backward ends.
    bool settles_itself = false;
    // Of the model: those of rank 0 travel with every round, for take_buffers().
    std::vector<at::Tensor> buffers;
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

  virtual ~GradientRounds();
  GradientRounds(const GradientRounds&) = delete;
  GradientRounds& operator=(const GradientRounds&) = delete;

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
  virtual void end_microbatch() { ++num_microbatches_; }

  // Every gradient of this backward is there. `has_next`: this rank will take part in another
  // round.
  void finish_backward(bool has_next = true);
  // A round of a rank that has no data left.
  void shadow_round(bool has_next = true);
  [[nodiscard]] bool is_open() const { return is_begun_; }
  // Whether the mean is over all ranks (DistributedDataParallel's default for uneven inputs) or, as
  // it is here, over those that took part.
  void set_divide_by_all(bool divides_by_all) { divides_by_all_ = divides_by_all; }
  // Sets `.grad` to the means.
  void settle();
  // Gives up an unfinished backward (it raised): its gradients are forgotten. Once a bucket has
  // been sent there is no way back for the other ranks, and all of them end.
  void abandon(const std::string& reason);

  // --- before settle(), once finish_backward() has run ---
  // Gradients that are not finite, of all ranks. On a device it waits for the device.
  virtual const std::vector<NonFinite>& nonfinite() = 0;
  // How many ranks go on after this round.
  std::int64_t num_contributors_next();
  // What this rank says with every round from now on, a bit for each wish.
  void set_wishes(std::uint8_t wishes) { own_wishes_ = wishes; }
  // The wishes of all ranks in the newest round, the same on each of them; 0 before the first.
  std::uint8_t wishes();
  // The bucket of a parameter; -1 for frozen ones.
  [[nodiscard]] std::int32_t bucket_of(std::size_t idx) const;
  [[nodiscard]] std::vector<std::int64_t> parameters_of(std::int32_t bucket_idx) const;
  // Multiplies what this rank has summed of an unfinished round.
  void scale(double factor);

  // Rank 0's buffers as they were when its last round ended; once a round, on every other rank.
  virtual void take_buffers() = 0;
  // What a lossy codec still owes, by name, in this object's memory: for checkpoints of this rank,
  // between rounds.
  virtual std::map<std::string, at::Tensor> feedback() = 0;
  // Counts every parameter as used in this round, whatever backward reached.
  void use_all() { std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{1}); }

  // The mean of a parameter that has a slot, whatever its `.grad` is.
  [[nodiscard]] at::Tensor mean(std::size_t idx) const { return views_[idx]; }
  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] std::int64_t memory_bytes() const;
  virtual Exchange::Statistics statistics() = 0;

  // What this rank is doing, for the others' errors.
  virtual void tell(std::string activity) = 0;
  // Ends sharing on every rank.
  virtual void fail_with(const std::string& reason) noexcept = 0;
  // The last word of a rank that has nothing left to share; the others may read it.
  virtual void leave(const std::string& text) = 0;

 protected:
  GradientRounds(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 c10::Device device, int rank, int size, const Options& options);

  // In this order, by the constructor of what carries: slots of its layout, the plan, memory for
  // the layout's arenas, views, and, when everything else is there, hooks. Its destructor begins
  // with drop_hooks().
  void check_shareable(std::size_t idx, std::string_view codec) const;
  [[nodiscard]] DType slot_dtype(std::size_t idx) const;
  void make_plan(Layout layout, const PlanOptions& options);
  void make_view(std::size_t idx);
  void make_hooks();
  void drop_hooks() noexcept { hooks_.reset(); }

  // --- what carries the gradients ---
  // A gradient arrives. Throws where none may.
  virtual void expect_usable() = 0;
  // Of num_contributors_ ranks.
  virtual void begin_round() = 0;
  // Copies or adds a gradient into its view; it may be the view itself.
  virtual void ingest(std::size_t idx, at::Tensor gradient, bool overwrites) = 0;
  virtual void zero(std::size_t idx) = 0;
  // The parameter's gradient is in its slot: see fill_slot().
  virtual void count_in(std::size_t idx) = 0;
  // Tells all ranks, and rank 0's buffers with it.
  virtual void publish(RoundFacts facts) = 0;
  virtual void await_facts() {}
  virtual RoundFacts facts_of(int rank) = 0;
  virtual void take_facts(int rank, RoundFacts& facts) = 0;
  // The round is over when this returns, but for assign() and what end_round() does.
  virtual void settle_round() = 0;
  virtual void end_round() {}
  virtual void assign(std::size_t idx);

  void begin();
  // The bucket that is full now, or -1.
  std::int32_t fill_slot(std::int64_t slot_idx);
  void read_facts();
  // What means are multiplied by where ranks ran out of data unannounced: they were counted in.
  [[nodiscard]] double mean_factor() const;
  [[nodiscard]] std::size_t parameter_at(std::int64_t slot_idx) const {
    return parameter_of_[static_cast<std::size_t>(slot_idx - first_slot_)];
  }

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  c10::Device device_;
  int rank_, size_;
  bool sums_microbatches_;
  Layout layout_;
  Plan plan_;
  std::vector<std::int64_t> slot_of_;      // by parameter; -1 where frozen
  std::vector<std::size_t> parameter_of_;  // by slot, from first_slot_ on
  std::int64_t first_slot_ = 0;
  std::vector<ZeroedMemory> arenas_;
  std::vector<at::Tensor> views_;  // by parameter

  std::mutex mutex_;
  bool is_shadow_ = false;                        // this rank has no data in this round
  std::int64_t num_microbatches_ = 0;             // before this one, since the last round
  std::vector<std::uint8_t> is_used_, is_taken_;  // by parameter
  std::vector<std::int64_t> num_missing_;         // by bucket: slots not filled yet
  std::vector<std::int32_t> arrivals_;            // buckets in the order in which they became full
  std::vector<at::Tensor> kept_;                  // by parameter: what a locally unused one had
  std::vector<std::uint8_t> is_used_anywhere_;
  std::int64_t num_contributors_ = 1, num_contributors_next_ = 1, num_present_ = 1;

 private:
  template <class Body>
  void under_autograd(const Body& body);
  void arrive(std::size_t idx);
  void close_backward();
  void take_in(std::size_t idx);
  void fill_missing(std::size_t idx);
  void publish_facts(bool has_next, bool is_present);

  bool settles_itself_;
  std::function<void(const Error&)> throw_through_autograd_;
  bool is_syncing_ = true;
  bool is_backward_open_ = false;
  bool is_begun_ = false;
  bool is_finished_ = false;
  bool divides_by_all_ = false;
  std::vector<std::int32_t> num_arrived_, num_expected_;
  bool knows_expected_ = false;
  std::vector<std::size_t> slot_arrivals_;
  bool has_published_ = false;  // in some round
  bool has_facts_ = false;
  std::uint8_t own_wishes_ = 0, wishes_ = 0;
  std::optional<WeightComparison> weights_;
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace tradewind
