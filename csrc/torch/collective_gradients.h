// The gradients of a model on one device, shared between ranks by collective calls: what
// SharedGradients is by point-to-point messages, for parameters that lie on a GPU (NCCL), and on
// the CPU for networks where only collectives work. Hooks take each gradient into its bucket on the
// device; full buckets go out on a Wire beside backward, in an order that all ranks share; settle()
// sets `.grad` to views of the means.
//
// Nothing here waits for a device: what the host must know of the other ranks (who took part, which
// parameters were used) travels over a group of host memory, and what only gradients tell (whether
// they are finite) stays on the device until somebody asks.
//
// A round is: hooks of one backward (or of several, the last with set_syncing(true)) ->
// finish_backward() -> settle(). All methods belong to the thread that runs the step, but fail()
// and tell(), which any thread may call; hooks may fire on any.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "share/codec.h"
#include "share/exchange.h"
#include "share/plan.h"
#include "share/presence.h"
#include "torch/bucket_arithmetic.h"
#include "torch/c10d_comm.h"
#include "torch/gradient_hooks.h"
#include "torch/round_facts.h"
#include "torch/shared_gradients.h"
#include "torch/wire.h"
#include "torch/zeroed_memory.h"

namespace tradewind {

class CollectiveGradients {
 public:
  using NonFinite = SharedGradients::NonFinite;
  using Statistics = Exchange::Statistics;

  struct Options {
    PlanOptions plan;
    Codec codec = Codec::kNone;
    bool error_feedback = true;
    // Sums in rank order, whatever the backend's own order would be. Codecs always have it.
    bool is_deterministic = false;
    std::chrono::milliseconds patience{30'000};
    std::chrono::milliseconds deadline{300'000};
    // As SharedGradients::Options has them.
    bool sums_microbatches = false;
    bool settles_itself = false;
    std::vector<at::Tensor> buffers;
    std::string cuda_library;
    bool emulates_device = false;  // see make_bucket_arithmetic()
    std::function<void(const std::string&)> on_late;
    std::function<void(const Error&)> throw_through_autograd;
  };

  // `values`: for the parameters' device, null where this rank is alone. `facts`: of the same
  // ranks, on host memory. Throws Error naming a parameter that cannot be shared.
  CollectiveGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                      c10::intrusive_ptr<c10d::ProcessGroup> values,
                      c10::intrusive_ptr<c10d::ProcessGroup> facts, std::shared_ptr<Board> board,
                      Options options);
  ~CollectiveGradients();
  CollectiveGradients(const CollectiveGradients&) = delete;
  CollectiveGradients& operator=(const CollectiveGradients&) = delete;

  // --- as SharedGradients has them ---
  void install_hooks() { hooks_->install(); }
  void remove_hooks() noexcept { hooks_->remove(); }
  void open_backward(bool syncs);
  [[nodiscard]] bool is_backward_open() const { return is_backward_open_; }
  void set_syncing(bool is_syncing) { is_syncing_ = is_syncing; }
  [[nodiscard]] bool is_syncing() const { return is_syncing_; }
  void end_microbatch();
  void finish_backward(bool has_next = true);
  void shadow_round(bool has_next = true);
  [[nodiscard]] bool is_open() const { return is_begun_; }
  void set_divide_by_all(bool divides_by_all) { divides_by_all_ = divides_by_all; }
  void settle();
  void abandon(const std::string& reason);
  // Of the last round. On a device it waits for the device.
  const std::vector<NonFinite>& nonfinite();
  std::int64_t num_contributors_next();
  [[nodiscard]] std::int32_t bucket_of(std::size_t idx) const;
  [[nodiscard]] std::vector<std::int64_t> parameters_of(std::int32_t bucket_idx) const;
  void scale(double factor);
  void take_buffers();
  void use_all() { std::fill(is_used_.begin(), is_used_.end(), std::uint8_t{1}); }
  [[nodiscard]] at::Tensor mean(std::size_t idx) const { return views_[idx]; }
  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] std::int64_t memory_bytes() const;
  [[nodiscard]] Statistics statistics();
  void tell(std::string activity) { presence_->tell(std::move(activity)); }
  void fail_with(const std::string& reason) noexcept;
  // The last word of a rank that has nothing left to share; the others may read it.
  void leave(const std::string& text) noexcept { presence_->leave(text); }

  // --- without a wait for the device ---
  // 1 where a gradient of any rank was not finite in the last round that was finished, else 0:
  // float32, 0-d, on the device, ready on its current stream.
  at::Tensor found_inf();
  // What nonfinite() reads, of the last round: kept by who may ask a round later.
  at::Tensor nonfinite_facts();
  [[nodiscard]] std::vector<NonFinite> nonfinite_of(const at::Tensor& facts) const;

  // What a lossy codec still owes, by name: for checkpoints of this rank, between rounds.
  [[nodiscard]] std::map<std::string, at::Tensor> feedback() const;

 private:
  struct Bucket {
    BucketRun run;  // all of it, alignment between slots included
    std::byte* data = nullptr;
    std::int64_t part_elements = 0;    // of one rank; the last ranks' may be cut short
    std::int64_t part_bytes = 0;       // on the wire
    at::Tensor error, mean_error;      // undefined without a lossy codec
    std::vector<at::Tensor> gaps;      // what aligns slots, where a codec reads it
    std::vector<at::Tensor> slots;     // one-dimensional
    at::Tensor sizes;                  // of slots, see BucketArithmetic::note_sizes
    std::vector<c10::Stream> streams;  // on which slots were filled
  };

  void end_quietly() noexcept;
  void make_layout();
  void make_buckets();
  void make_staging();
  void find_gaps(std::size_t bucket_idx);
  void make_view(std::size_t idx);
  // An error in a hook reaches Python as what it is.
  template <class Body>
  void under_autograd(const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      if (options_.throw_through_autograd) options_.throw_through_autograd(error);
      throw;
    }
  }
  void check_alive();
  void join(Wire& wire);
  void arrive(std::size_t idx);
  void close_backward();
  void begin();
  void take_in(std::size_t idx);
  void zero(std::size_t idx);
  void fill_missing(std::size_t idx);
  void count_in(std::size_t idx);
  void launch_ready();
  void launch(std::int32_t bucket_idx);
  void reduce(Bucket& bucket, double divisor, void* stream);
  void reduce_in_parts(Bucket& bucket, double divisor, void* stream);
  void note_nonfinite();
  void assign(std::size_t idx);
  void publish_facts(bool has_next, bool is_present);
  void publish_nonfinite();
  void publish_buffers();
  void read_facts();
  void check_weights(int rank, const RoundFacts& facts);
  [[nodiscard]] std::uint32_t num_changes() const;
  [[nodiscard]] std::uint64_t weights_digest() const;
  [[nodiscard]] C10dCommOptions comm_options();
  [[nodiscard]] double mean_factor() const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  Options options_;
  c10::Device device_;
  int rank_ = 0;
  int size_ = 1;
  Layout layout_;
  Plan plan_;
  std::vector<std::int64_t> slot_of_;      // by parameter; -1 where frozen
  std::vector<std::size_t> parameter_of_;  // by slot
  std::vector<ZeroedMemory> arenas_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<Bucket> buckets_;
  // Positions: slots in the order of buckets, which is nearly backward's.
  std::vector<std::size_t> parameter_at_;
  at::Tensor sent_, received_, mean_part_, wire_part_;  // shared by buckets: they take turns
  std::unique_ptr<BucketArithmetic> arithmetic_;

  std::mutex mutex_;
  bool is_syncing_ = true;
  bool is_backward_open_ = false;
  bool is_begun_ = false;
  bool is_finished_ = false;
  std::int64_t num_microbatches_ = 0;  // before this one, since the last round
  std::int64_t num_rounds_ = 0;
  std::int64_t sent_bytes_ = 0;
  std::vector<std::uint8_t> is_used_, is_taken_;  // by parameter
  std::vector<std::int32_t> num_arrived_, num_expected_;
  bool knows_expected_ = false;
  std::vector<std::int64_t> num_missing_;  // by bucket: slots not taken in yet
  std::vector<std::int32_t> arrivals_;     // buckets in the order in which they became full
  std::vector<std::size_t> slot_arrivals_;
  std::vector<std::int32_t> order_;  // in which buckets go out: rank 0's arrivals a round before
  std::size_t num_launched_ = 0;     // of order_
  std::vector<at::Tensor> kept_;     // by parameter: what a locally unused one had

  std::vector<std::byte> own_facts_, all_facts_;
  bool has_facts_ = false;
  std::vector<std::uint8_t> is_used_anywhere_;
  std::int64_t num_contributors_ = 1, num_contributors_next_ = 1, num_present_ = 1;
  bool divides_by_all_ = false;
  std::vector<std::uint32_t> num_changes_of_;  // by rank, in the last round
  int first_present_ = -1;                     // of the ranks that took part in this round
  std::uint32_t num_changed_first_ = 0;        // its changes since the round before
  std::uint64_t digest_of_first_ = 0;
  bool compares_weights_ = false;  // in this round
  bool compares_next_ = false;

  // On the device. By position: 0, or the microbatch in which the gradient was first not finite.
  at::Tensor found_in_, positions_;
  std::vector<at::Tensor> sizes_;  // of slots by position, by arena; buckets have parts of them
  // int64 [rank, 3]: how many parameters' gradients were not finite, the first one's position, and
  // its microbatch. Of each round anew, so that an older one can still be read.
  at::Tensor nonfinite_facts_;
  std::vector<NonFinite> nonfinite_;
  bool has_nonfinite_ = true;  // of the last round; none yet
  // One for each dtype of buffers: rank 0's, as they were when its last round ended.
  struct Buffers {
    std::vector<at::Tensor> tensors;
    at::Tensor flat;
  };
  std::vector<Buffers> buffers_;
  bool has_buffers_ = true;

  std::mutex failure_mutex_;
  std::string failure_;
  std::unique_ptr<Presence> presence_;
  std::unique_ptr<C10dComm> values_, facts_;
  std::unique_ptr<Wire> values_wire_, facts_wire_;
  // Last, so that no hook finds the rest gone.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace tradewind
