// The libnccl that torch uses, opened at run time: the one that the process has already loaded
// comes before any other, as two in a process would each claim the device. It stays open for the
// life of the process. Thread-safe after construction.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "share/nccl_api.h"

namespace tradewind {

class NcclLibrary {
 public:
  // `paths` are tried in order, twice: for one that is loaded already, then for one that opens.
  // Throws Error(kBadState) naming every path and reason, or the function or version that lacks.
  explicit NcclLibrary(const std::vector<std::string>& paths);
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // 2.18.5 is 21805.
  [[nodiscard]] int version() const noexcept { return version_; }
  [[nodiscard]] std::string version_text() const;  // "2.18.5"

  // What older versions lack. Without it, the functions below are null.
  [[nodiscard]] bool has_registration() const noexcept { return comm_register != nullptr; }
  [[nodiscard]] bool has_allocation() const noexcept { return mem_alloc != nullptr; }
  [[nodiscard]] bool has_shrink() const noexcept { return comm_shrink != nullptr; }
  [[nodiscard]] bool has_pre_mul_sum() const noexcept { return red_op_create != nullptr; }

  // Throws Error(kBadState) naming the feature, this version and the one that has it.
  void require(bool has_feature, const char* feature, const char* since) const;

  // What NCCL says about a result: its number, its text and its last message.
  [[nodiscard]] std::string text_of(nccl::Result result) const;

  nccl::GetUniqueId get_unique_id = nullptr;
  nccl::CommInitRankConfig comm_init_rank_config = nullptr;
  nccl::CommFinalize comm_finalize = nullptr;
  nccl::CommDestroy comm_destroy = nullptr;
  nccl::CommAbort comm_abort = nullptr;
  nccl::CommGetAsyncError comm_get_async_error = nullptr;
  nccl::GroupStart group_start = nullptr;
  nccl::GroupEnd group_end = nullptr;
  nccl::AllReduce all_reduce = nullptr;
  nccl::ReduceScatter reduce_scatter = nullptr;
  nccl::AllGather all_gather = nullptr;
  nccl::Broadcast broadcast = nullptr;
  nccl::Send send = nullptr;
  nccl::Recv recv = nullptr;
  // Null in older versions.
  nccl::CommRegister comm_register = nullptr;
  nccl::CommDeregister comm_deregister = nullptr;
  nccl::MemAlloc mem_alloc = nullptr;
  nccl::MemFree mem_free = nullptr;
  nccl::CommShrink comm_shrink = nullptr;
  nccl::RedOpCreatePreMulSum red_op_create = nullptr;
  nccl::RedOpDestroy red_op_destroy = nullptr;

 private:
  nccl::GetErrorString get_error_string_ = nullptr;
  nccl::GetLastError get_last_error_ = nullptr;
  std::string path_;
  int version_ = 0;
};

}  // namespace tradewind
