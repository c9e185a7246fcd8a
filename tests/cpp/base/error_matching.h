// Expects that a call throws Error of one kind whose message has each of some parts: the subject,
// what was expected, what came.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "base/error.h"

namespace tradewind {

template <class Call>
void expect_error(ErrorKind kind, std::initializer_list<std::string> parts, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "expected '" << part << "' in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << "expected an Error, got none";
}

}  // namespace tradewind
