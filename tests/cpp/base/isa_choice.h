// What a new process answers where TRADEWIND_ISA is `wanted` (null: not set), or its error's text:
// the variable is read once, so each case is a process.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace tradewind {

template <class Answer>
std::string answer_with_isa(const char* wanted, const Answer& answer) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    wanted == nullptr ? unsetenv("TRADEWIND_ISA") : setenv("TRADEWIND_ISA", wanted, 1);
    std::string text;
    try {
      text = answer();
    } catch (const Error& error) {
      text = error.what();
    }
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  char text[1024];
  const ssize_t length = read(ends[0], text, sizeof(text));
  close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return length < 0 ? "nothing" : std::string(text, static_cast<std::size_t>(length));
}

}  // namespace tradewind
