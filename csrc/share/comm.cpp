#include "share/comm.h"

#include <cstddef>
#include <limits>
#include <sstream>

#include "base/error.h"

namespace tradewind {
namespace {

constexpr const char* kCollectiveNames[] = {"all_reduce", "reduce_scatter", "all_gather",
                                            "all_to_all", "broadcast"};
constexpr const char* kReductionNames[] = {"sum", "max", "mean"};

const char* name_of(Collective collective) {
  return kCollectiveNames[static_cast<int>(collective)];
}

bool has_parts(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather ||
         collective == Collective::kAllToAll;
}

bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

void check_count(const CommCall& call, int rank, int size) {
  const std::int64_t most =
      std::numeric_limits<std::int64_t>::max() / element_bytes(call.dtype) / size;
  if (call.num_elements < 0 || call.num_elements > most) {
    fail(ErrorKind::kBadValue, name_of(call.collective), " on rank ", rank, " of ", size,
         ": expected 0 to ", most, " elements of ", dtype_name(call.dtype), ", got ",
         call.num_elements, "; pass the elements of one rank's part");
  }
}

void check_reduction(const CommCall& call, int rank, int size) {
  if (!reduces(call.collective)) return;
  const bool is_number = is_floating(call.dtype) || is_complex(call.dtype);
  const char* remedy = nullptr;
  if (call.reduction == Reduction::kMean && !is_number) {
    remedy = "a mean of integers would be rounded: sum them, and divide where they are read";
  } else if (call.reduction == Reduction::kMax && is_complex(call.dtype)) {
    remedy = "complex numbers have no order: reduce their absolute values";
  } else if (call.reduction == Reduction::kSum && call.dtype == DType::kBool) {
    remedy = "a sum of truth values overflows: use max for 'any', or sum them as int32";
  }
  if (remedy != nullptr) {
    fail(ErrorKind::kBadType, kReductionNames[static_cast<int>(call.reduction)], " in ",
         text_of(call, rank, size), ": ", remedy);
  }
}

// Whether [input, input + bytes) and [output, output + bytes) share memory.
bool overlap(const void* input, const void* output, std::int64_t bytes) {
  const auto a = reinterpret_cast<std::uintptr_t>(input);
  const auto b = reinterpret_cast<std::uintptr_t>(output);
  return (a > b ? a - b : b - a) < static_cast<std::uintptr_t>(bytes);
}

void check_pointers(const CommCall& call, int rank, int size) {
  if (call.input == nullptr || call.output == nullptr) {
    fail(ErrorKind::kBadValue, text_of(call, rank, size), ": expected memory, got null as its ",
         call.input == nullptr ? "input" : "output", "; pass memory of that many bytes");
  }
  if (call.collective == Collective::kAllToAll &&
      overlap(call.input, call.output, bytes_of(call, size))) {
    fail(ErrorKind::kBadValue, text_of(call, rank, size),
         ": expected an output apart from the input, got memory that overlaps; it cannot run in "
         "place: pass an output of its own");
  }
}

}  // namespace

std::int64_t bytes_of(const CommCall& call, int size) {
  return call.num_elements * element_bytes(call.dtype) * (has_parts(call.collective) ? size : 1);
}

std::string text_of(const CommCall& call, int rank, int size) {
  std::ostringstream text;
  text << name_of(call.collective) << " of ";
  if (has_parts(call.collective)) text << size << " x ";
  text << call.num_elements << " " << dtype_name(call.dtype) << " (" << bytes_of(call, size)
       << " bytes) on rank " << rank << " of " << size;
  return text.str();
}

Comm::Comm(int rank, int size) : rank_(rank), size_(size) {
  if (size < 1 || rank < 0 || rank >= size) {
    fail(ErrorKind::kBadValue, "a group of ", size, " ranks: expected a rank from 0 to ", size - 1,
         ", got ", rank);
  }
}

void Comm::queue_checked(const CommCall& call) {
  check_count(call, rank_, size_);
  check_reduction(call, rank_, size_);
  if (call.root < 0 || call.root >= size_) {
    fail(ErrorKind::kBadValue, text_of(call, rank_, size_), ": expected a root from 0 to ",
         size_ - 1, ", got ", call.root, "; pass the rank whose values count");
  }
  if (call.num_elements == 0) return;
  check_pointers(call, rank_, size_);
  queue(call);
}

void Comm::all_reduce(const void* input, void* output, std::int64_t num_elements, DType dtype,
                      Reduction reduction, void* stream) {
  queue_checked({Collective::kAllReduce, input, output, num_elements, dtype, reduction, 0, stream});
}

void Comm::reduce_scatter(const void* input, void* output, std::int64_t part_elements, DType dtype,
                          Reduction reduction, void* stream) {
  queue_checked(
      {Collective::kReduceScatter, input, output, part_elements, dtype, reduction, 0, stream});
}

void Comm::all_gather(const void* input, void* output, std::int64_t part_elements, DType dtype,
                      void* stream) {
  queue_checked({Collective::kAllGather, input, output, part_elements, dtype, {}, 0, stream});
}

void Comm::all_to_all(const void* input, void* output, std::int64_t part_elements, DType dtype,
                      void* stream) {
  queue_checked({Collective::kAllToAll, input, output, part_elements, dtype, {}, 0, stream});
}

void Comm::broadcast(void* data, std::int64_t num_elements, DType dtype, int root, void* stream) {
  queue_checked({Collective::kBroadcast, data, data, num_elements, dtype, {}, root, stream});
}

CommGroup::CommGroup(Comm& comm) : comm_(&comm) { comm.group_begin(); }

CommGroup::~CommGroup() noexcept {
  if (comm_ == nullptr) return;
  try {
    comm_->group_end();
  } catch (...) {  // the failure that led here is the one to tell
  }
}

void CommGroup::end() {
  Comm* comm = comm_;
  comm_ = nullptr;
  comm->group_end();
}

}  // namespace tradewind
