// The one exception type of the core. Its kind decides which Python exception it becomes
// (csrc/bindings/exceptions.cpp has the table); its message names the subject, what was expected,
// what came and what to do. Failures of the file system carry their errno and path as well.
#pragma once

#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tradewind {

enum class ErrorKind : std::uint8_t {
  kBadValue,     // the caller's value is wrong                    -> ValueError
  kBadType,      // the caller's value has the wrong kind          -> TypeError
  kBadState,     // the call is right, the moment is not           -> RuntimeError
  kOutOfMemory,  // the system refused memory                      -> MemoryError
  kPeerLost,     // another rank is gone, late or has failed       -> SharingError
  kSystem,       // the system refused a call on a file            -> OSError, by errno
  kDamaged,      // a checkpoint is not what was written           -> DamagedCheckpointError
};

// What Error(kSystem) is about; `reason` has the errno's text, and not the path.
struct SystemFailure {
  int error_number;
  std::string reason;
  std::string path;
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  explicit Error(SystemFailure failure)
      : std::runtime_error(failure.reason + ": '" + failure.path + "'"),
        kind_(ErrorKind::kSystem),
        failure_(std::make_shared<const SystemFailure>(std::move(failure))) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  // Of kSystem alone, else null.
  [[nodiscard]] const SystemFailure* system_failure() const noexcept { return failure_.get(); }
  // The errno of kSystem, else 0.
  [[nodiscard]] int error_number() const noexcept { return failure_ ? failure_->error_number : 0; }

 private:
  ErrorKind kind_;
  std::shared_ptr<const SystemFailure> failure_;  // shared: copies of exceptions must not throw
};

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

// Error(kSystem): `parts` say what was tried.
template <class... Parts>
[[noreturn]] void fail_system(int error_number, const std::string& path, const Parts&... parts) {
  std::ostringstream reason;
  (reason << ... << parts);
  reason << ": " << std::generic_category().message(error_number);
  throw Error(SystemFailure{error_number, reason.str(), path});
}

}  // namespace tradewind
