#include "share/nccl_library.h"

#include <dlfcn.h>

#include <sstream>
#include <type_traits>

#include "base/error.h"

namespace tradewind {
namespace {

// The first with calls that return at once, which every deadline here is built on.
constexpr int kOldestVersion = nccl::version_code(2, 14, 0);

std::string text_of_version(int version) {
  std::ostringstream text;
  if (version < 10000) version = version / 1000 * 10000 + version % 1000;  // up to 2.8: 2804
  text << version / 10000 << "." << version / 100 % 100 << "." << version % 100;
  return text.str();
}

void* open_one(const std::vector<std::string>& paths, std::string& opened) {
  std::ostringstream reasons;
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const std::string& path : paths) {
      opened = path;
      if (void* handle = dlopen(path.c_str(), flags); handle != nullptr) return handle;
      const char* reason = dlerror();
      if ((flags & RTLD_NOLOAD) == 0) {
        reasons << "\n  " << path << ": " << (reason == nullptr ? "not found" : reason);
      }
    }
  }
  fail(ErrorKind::kBadState, "NCCL: expected the library that torch uses, found none; tried ",
       paths.size(), " paths", reasons.str(),
       "\ninstall a torch that was built with CUDA, or pass the path of its libnccl.so.2");
}

}  // namespace

NcclLibrary::NcclLibrary(const std::vector<std::string>& paths) {
  void* handle = open_one(paths, path_);
  const auto bind_where_found = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
  };
  const auto bind = [&](auto& function, const char* name) {
    bind_where_found(function, name);
    if (function == nullptr) {
      fail(ErrorKind::kBadState, path_, ": expected the function ", name, " of NCCL ",
           text_of_version(kOldestVersion), " or later, found ",
           version_ == 0 ? "none" : "version " + version_text() + " without it",
           "; install a newer torch or NCCL");
    }
  };

  nccl::GetVersion get_version = nullptr;
  bind(get_version, "ncclGetVersion");
  bind(get_error_string_, "ncclGetErrorString");
  bind_where_found(get_last_error_, "ncclGetLastError");
  if (const nccl::Result result = get_version(&version_); result != nccl::kSuccess) {
    fail(ErrorKind::kBadState, path_, ": expected its version, got ", text_of(result),
         "; reinstall torch or NCCL");
  }
  if (version_ < kOldestVersion) {
    fail(ErrorKind::kBadState, path_, ": expected NCCL ", text_of_version(kOldestVersion),
         " or later, found ", version_text(), "; install a newer torch or NCCL");
  }

  bind(get_unique_id, "ncclGetUniqueId");
  bind(comm_init_rank_config, "ncclCommInitRankConfig");
  bind(comm_finalize, "ncclCommFinalize");
  bind(comm_destroy, "ncclCommDestroy");
  bind(comm_abort, "ncclCommAbort");
  bind(comm_get_async_error, "ncclCommGetAsyncError");
  bind(group_start, "ncclGroupStart");
  bind(group_end, "ncclGroupEnd");
  bind(all_reduce, "ncclAllReduce");
  bind(reduce_scatter, "ncclReduceScatter");
  bind(all_gather, "ncclAllGather");
  bind(broadcast, "ncclBroadcast");
  bind(send, "ncclSend");
  bind(recv, "ncclRecv");

  // Each with its counterpart or not at all.
  const auto bind_pair = [&](auto& make, const char* make_name, auto& unmake,
                             const char* unmake_name) {
    bind_where_found(make, make_name);
    bind_where_found(unmake, unmake_name);
    if (unmake == nullptr) make = nullptr;
  };
  bind_pair(comm_register, "ncclCommRegister", comm_deregister, "ncclCommDeregister");
  bind_pair(mem_alloc, "ncclMemAlloc", mem_free, "ncclMemFree");
  bind_pair(red_op_create, "ncclRedOpCreatePreMulSum", red_op_destroy, "ncclRedOpDestroy");
  bind_where_found(comm_shrink, "ncclCommShrink");
}

std::string NcclLibrary::version_text() const { return text_of_version(version_); }

void NcclLibrary::require(bool has_feature, const char* feature, const char* since) const {
  if (!has_feature) {
    fail(ErrorKind::kBadState, feature, ": expected NCCL ", since, " or later, found ",
         version_text(), " in ", path_, "; install a newer torch or NCCL, or do without it");
  }
}

std::string NcclLibrary::text_of(nccl::Result result) const {
  std::ostringstream text;
  text << "NCCL error " << static_cast<int>(result) << ", " << get_error_string_(result);
  const char* last = get_last_error_ == nullptr ? nullptr : get_last_error_(nullptr);
  if (last != nullptr && last[0] != '\0') text << " (" << last << ")";
  return text.str();
}

}  // namespace tradewind
