// c10d's headers pull in all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include "torch/c10d_comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "torch/slot_tensor.h"

namespace tradewind {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Between two questions whether another rank has ended: each is one to the store.
constexpr Milliseconds kAskEvery{250};

std::string seconds_text(Milliseconds duration) {
  std::ostringstream text;
  text << static_cast<double>(duration.count()) / 1000.0 << " s";
  return text.str();
}

// Sums of 16 bits are taken in float32, as everywhere in sharing.
bool is_16_bit(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

}  // namespace

C10dComm::C10dComm(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                   C10dCommOptions options)
    : Comm(group->getRank(), group->getSize()),
      device_(device),
      options_(std::move(options)),
      group_(std::move(group)) {}

C10dComm::~C10dComm() = default;

// --- calls ---------------------------------------------------------------------------------------

void C10dComm::queue(const CommCall& call) {
  const c10::AutoGradMode no_grad(false);
  const std::string doing = text_of(call, rank(), size());
  {
    const std::scoped_lock lock(mutex_);
    last_ = doing;
  }
  check();
  check_stream(call);
  // Gloo's own reduce-scatter moves an all-reduce's bytes.
  if (call.collective == Collective::kReduceScatter && device_.is_cpu()) {
    reduce_parts(call);
    return;
  }
  WorkPtr work;
  try {
    work = begin(call, *group());
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    lost(doing, error.what());
  }
  finish(call, work);
}

C10dComm::WorkPtr C10dComm::begin(const CommCall& call, c10d::ProcessGroup& group) {
  const bool reduces =
      call.collective == Collective::kAllReduce || call.collective == Collective::kReduceScatter;
  if (reduces) return begin_reduction(call, group);
  // What only moves, moves as bytes: every backend takes them.
  const std::int64_t part = call.num_elements * element_bytes(call.dtype);
  const bool has_parts = call.collective != Collective::kBroadcast;
  const bool sends_parts = call.collective == Collective::kAllToAll;
  at::Tensor input = tensor_at(call.input, sends_parts ? part * size() : part, at::kByte);
  at::Tensor output = tensor_at(call.output, has_parts ? part * size() : part, at::kByte);
  if (call.collective == Collective::kAllGather) {
    c10d::AllgatherOptions options;
    options.timeout = options_.timeout;
    return group._allgather_base(output, input, options);
  }
  if (call.collective == Collective::kAllToAll) {
    c10d::AllToAllOptions options;
    options.timeout = options_.timeout;
    std::vector<std::int64_t> equal;  // parts of one size
    return group.alltoall_base(output, input, equal, equal, options);
  }
  c10d::BroadcastOptions options;
  options.timeout = options_.timeout;
  options.rootRank = call.root;
  std::vector<at::Tensor> tensors{output};
  return group.broadcast(tensors, options);
}

C10dComm::WorkPtr C10dComm::begin_reduction(const CommCall& call, c10d::ProcessGroup& group) {
  const bool is_scatter = call.collective == Collective::kReduceScatter;
  // A complex number adds as its two parts; truth values have a maximum as bytes.
  const std::int64_t num_elements = call.num_elements * (is_complex(call.dtype) ? 2 : 1);
  at::ScalarType dtype = torch_dtype(call.dtype);
  if (is_complex(call.dtype)) dtype = c10::toRealValueType(dtype);
  if (dtype == at::kBool) dtype = at::kByte;
  at::Tensor input = tensor_at(call.input, num_elements * (is_scatter ? size() : 1), dtype);
  at::Tensor output = tensor_at(call.output, num_elements, dtype);
  // Gloo knows no mean: every backend gets a sum of values that are divided first.
  const double factor = call.reduction == Reduction::kMean ? 1.0 / size() : 1.0;
  const c10d::ReduceOp op(call.reduction == Reduction::kMax ? c10d::ReduceOp::MAX
                                                            : c10d::ReduceOp::SUM);
  if (is_scatter) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
    options.timeout = options_.timeout;
    if (factor != 1.0) input = input.mul(factor);
    return group._reduce_scatter_base(output, input, options);
  }
  if (call.input != call.output) output.copy_(input);
  if (factor != 1.0) output.mul_(factor);
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = options_.timeout;
  std::vector<at::Tensor> tensors{output};
  return group.allreduce(tensors, options);
}

// All-to-all, and this rank's part reduced in rank order.
void C10dComm::reduce_parts(const CommCall& call) {
  const std::int64_t num_bytes = bytes_of(call, size());
  const at::Tensor received = at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte));
  CommCall moving = call;
  moving.collective = Collective::kAllToAll;
  moving.output = received.mutable_data_ptr();
  finish(moving, begin(moving, *group()));
  const auto* from = static_cast<const std::byte*>(received.const_data_ptr());
  const auto part = [&](int peer) {
    return tensor_at(from + peer * num_bytes / size(), call.num_elements, torch_dtype(call.dtype));
  };
  const double factor = call.reduction == Reduction::kMean ? 1.0 / size() : 1.0;
  const auto own = [&](int peer) {
    at::Tensor values = is_16_bit(call.dtype) ? part(peer).to(at::kFloat) : part(peer);
    return factor == 1.0 ? values : values.mul(factor);
  };
  at::Tensor total = own(0).clone();
  for (int peer = 1; peer < size(); ++peer) {
    if (call.reduction == Reduction::kMax) {
      total = at::maximum(total, own(peer));
    } else {
      total.add_(own(peer));
    }
  }
  tensor_at(call.output, call.num_elements, torch_dtype(call.dtype)).copy_(total);
}

void C10dComm::finish(const CommCall& call, const WorkPtr& work) {
  const std::string doing = text_of(call, rank(), size());
  try {
    if (device_.is_cpu()) {
      const auto began = Clock::now();
      auto asks_next = began + kAskEvery;
      bool is_told = false;
      while (!poll_until(asks_next, [&] { return work->isCompleted(); })) {
        check();  // aborted by another thread
        const std::string ended = options_.why_ended ? options_.why_ended() : "";
        if (!ended.empty()) lost(doing, ended);
        const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - began);
        if (waited >= options_.timeout) lost(doing, "the deadline of it is over");
        if (!is_told && waited >= options_.patience && options_.on_late) {
          is_told = true;
          options_.on_late(doing + " has waited " + seconds_text(waited) +
                           "; it goes on waiting until " + seconds_text(options_.timeout) +
                           (options_.others ? "; " + options_.others() : ""));
        }
        asks_next = Clock::now() + kAskEvery;
      }
    }
    // Over on host memory, so that only its error is left; on a device the stream waits.
    work->wait();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    lost(doing, error.what());
  }
}

void C10dComm::lost(const std::string& doing, const std::string& why) {
  std::ostringstream text;
  text << doing << ": lost a rank, or waited " << seconds_text(options_.timeout) << " for it ("
       << why.substr(0, 300) << ")";
  const std::string said = options_.others ? options_.others() : "";
  if (!said.empty()) text << "; " << said;
  text << "; start the ranks again from the last checkpoint";
  {
    const std::scoped_lock lock(mutex_);
    if (failure_.empty()) failure_ = text.str();
  }
  fail(ErrorKind::kPeerLost, text.str());
}

// --- streams -------------------------------------------------------------------------------------

void C10dComm::check_stream(const CommCall& call) const {
  if (device_.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  if (guard.getStream(device_).native_handle() == call.stream) return;
  fail(ErrorKind::kBadState, text_of(call, rank(), size()),
       ": expected the calling thread's current stream, which torch's process groups are ordered "
       "by, got another one; make it the current one around the call");
}

at::Tensor C10dComm::tensor_at(const void* data, std::int64_t num_elements,
                               at::ScalarType dtype) const {
  // SAFETY: the caller of the Comm keeps the memory until its stream has passed the call; inputs
  // are only read.
  return row_over(const_cast<void*>(data), num_elements, dtype, device_);
}

at::Tensor C10dComm::barrier_tensor() {
  if (!barrier_.defined()) {
    barrier_ = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device_));
  }
  return barrier_;
}

void C10dComm::barrier(void* stream, Deadline deadline) {
  void* data = barrier_tensor().mutable_data_ptr();
  all_reduce(data, data, 1, DType::kInt32, Reduction::kMax, stream);
  wait(stream, deadline);
}

void C10dComm::wait(void* stream, Deadline deadline) {
  check();
  if (device_.is_cpu()) return;
  CommCall here;
  here.stream = stream;
  check_stream(here);
  c10::Event event(device_.type());
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  if (poll_until(deadline, [&] { return event.query(); })) return;
  std::string last;
  {
    const std::scoped_lock lock(mutex_);
    last = last_;
  }
  lost(last.empty() ? "a wait for the device" : last, "the device has not come so far");
}

// --- the end -------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::ProcessGroup> C10dComm::group() {
  check();
  const std::scoped_lock lock(mutex_);
  return group_;
}

void C10dComm::check() {
  const std::scoped_lock lock(mutex_);
  if (!failure_.empty()) fail(ErrorKind::kPeerLost, failure_);
}

void C10dComm::abort(Deadline deadline) { let_go(deadline, /*is_quiet=*/false); }
void C10dComm::close(Deadline deadline) { let_go(deadline, /*is_quiet=*/true); }

void C10dComm::let_go(Deadline deadline, bool is_quiet) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  {
    const std::scoped_lock lock(mutex_);
    if (failure_.empty()) failure_ = "the group was aborted or closed; make another one";
    group = std::move(group_);
    group_ = nullptr;
  }
  if (!group) return;
  // The last owner waits for what Gloo has begun, which its own deadline ends.
  const bool is_over = returns_within(deadline, [group = std::move(group), is_quiet]() mutable {
    try {
      is_quiet ? group->shutdown() : group->abort();
    } catch (...) {  // whatever is left of it goes with its last owner
    }
    group.reset();
  });
  if (!is_over) {
    fail(ErrorKind::kBadState, is_quiet ? "close" : "abort", " on rank ", rank(), " of ", size(),
         ": the group did not end in time; end the process");
  }
}

}  // namespace tradewind
