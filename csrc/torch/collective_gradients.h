// The gradients of a model on one device, shared between ranks by collective calls: what
// SharedGradients is by point-to-point messages, for parameters that lie on a GPU (NCCL), and on
// the CPU for networks where only collectives work. Full buckets go out on a Wire beside backward,
// in an order that all ranks share.
//
// Nothing here waits for a device: what the host must know of the other ranks (who took part, which
// parameters were used) travels over a group of host memory, and what only gradients tell (whether
// they are finite) stays on the device until somebody asks.
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
#include "share/presence.h"
#include "torch/bucket_arithmetic.h"
#include "torch/c10d_comm.h"
#include "torch/gradient_rounds.h"
#include "torch/wire.h"

namespace tradewind {

class CollectiveGradients final : public GradientRounds {
 public:
  struct Options : GradientRounds::Options {
    Codec codec = Codec::kNone;
    bool error_feedback = true;
    // Sums in rank order, whatever the backend's own order would be. Codecs always have it.
    bool is_deterministic = false;
    std::chrono::milliseconds patience{30'000};
    std::chrono::milliseconds deadline{300'000};
    std::string cuda_library;
    bool emulates_device = false;  // see make_bucket_arithmetic()
  };

  // `values`: for the parameters' device, null where this rank is alone. `facts`: of the same
  // ranks, on host memory. Throws Error naming a parameter that cannot be shared.
  CollectiveGradients(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                      c10::intrusive_ptr<c10d::ProcessGroup> values,
                      c10::intrusive_ptr<c10d::ProcessGroup> facts, std::shared_ptr<Board> board,
                      Options options);
  ~CollectiveGradients() override;

  void end_microbatch() override;
  const std::vector<NonFinite>& nonfinite() override;
  void take_buffers() override;
  std::map<std::string, at::Tensor> feedback() override;
  Exchange::Statistics statistics() override;
  void tell(std::string activity) override { presence_->tell(std::move(activity)); }
  void fail_with(const std::string& reason) noexcept override;
  void leave(const std::string& text) override { presence_->leave(text); }

  // --- without a wait for the device ---
  // 1 where a gradient of any rank was not finite in the last round that was finished, else 0:
  // float32, 0-d, on the device, ready on its current stream.
  at::Tensor found_inf();
  // What nonfinite() reads, of the last round: kept by who may ask a round later.
  at::Tensor nonfinite_facts();
  [[nodiscard]] std::vector<NonFinite> nonfinite_of(const at::Tensor& facts) const;

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

  void expect_usable() override { check_alive(); }
  void begin_round() override;
  void ingest(std::size_t idx, at::Tensor gradient, bool overwrites) override;
  void zero(std::size_t idx) override;
  void count_in(std::size_t idx) override;
  void publish(RoundFacts facts) override;
  void await_facts() override { join(*facts_wire_); }
  RoundFacts facts_of(int rank) override;
  void take_facts(int rank, RoundFacts& facts) override;
  void settle_round() override;
  void end_round() override;

  void end_quietly() noexcept;
  [[nodiscard]] Layout make_layout();
  void make_buckets();
  void make_staging();
  void find_gaps(std::size_t bucket_idx);
  void check_alive();
  void join(Wire& wire);
  void launch_ready();
  void launch(std::int32_t bucket_idx);
  void reduce(Bucket& bucket, double divisor, void* stream);
  void reduce_in_parts(Bucket& bucket, double divisor, void* stream);
  void note_nonfinite();
  void publish_nonfinite();
  void publish_buffers();
  [[nodiscard]] C10dCommOptions comm_options();

  Options options_;
  std::vector<Bucket> buckets_;
  // Positions: slots in the order of buckets, which is nearly backward's.
  std::vector<std::size_t> parameter_at_;
  at::Tensor sent_, received_, mean_part_, wire_part_;  // shared by buckets: they take turns
  std::unique_ptr<BucketArithmetic> arithmetic_;

  std::int64_t num_rounds_ = 0;
  std::int64_t sent_bytes_ = 0;
  std::vector<std::int32_t> order_;  // in which buckets go out: rank 0's arrivals a round before
  std::size_t num_launched_ = 0;     // of order_

  std::vector<std::byte> own_facts_, all_facts_;

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
};

}  // namespace tradewind
