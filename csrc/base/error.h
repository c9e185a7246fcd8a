// The one exception type of the core. Its kind decides which Python exception it becomes
// (csrc/bindings/exceptions.cpp has the table); its message names the subject, what was expected,
// what came and what to do.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tradewind {

enum class ErrorKind : std::uint8_t {
  kBadValue,     // the caller's value is wrong                    -> ValueError
  kBadType,      // the caller's value has the wrong kind          -> TypeError
  kBadState,     // the call is right, the moment is not           -> RuntimeError
  kOutOfMemory,  // the system refused memory                      -> MemoryError
  kPeerLost,     // another rank is gone, late or has failed       -> tradewind.SharingError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

}  // namespace tradewind
