// Ranks as forked processes: each runs the body, and what it reports reaches the test. A rank that
// does not end is killed by its alarm.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/error.h"

namespace tradewind {

// What a rank found wrong; nothing where all is well.
class RankReport {
 public:
  void expect(bool is_so, const std::string& what) {
    if (!is_so && text_.size() < 4000) text_ += "\n  " + what;
  }
  // Expects an Error, whose text it returns.
  template <class Call>
  std::string expect_error(ErrorKind kind, std::initializer_list<std::string> parts,
                           const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      expect(error.kind() == kind, std::string("another kind of error: ") + error.what());
      for (const std::string& part : parts) {
        expect(std::string(error.what()).find(part) != std::string::npos,
               "expected '" + part + "' in: " + error.what());
      }
      return error.what();
    }
    expect(false, "expected an Error, got none");
    return {};
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Runs body(rank, report) in `num_ranks` children. Those of `dying` end as they like.
inline void run_ranks(int num_ranks, const std::function<void(int, RankReport&)>& body,
                      const std::vector<int>& dying = {}) {
  constexpr unsigned kMostSeconds = 60;
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(kMostSeconds);
      RankReport report;
      try {
        body(rank, report);
      } catch (const std::exception& error) {
        report.expect(false, error.what());
      }
      const ssize_t written = write(ends[1], report.text().data(), report.text().size());
      _exit(report.text().empty() && written == 0 ? 0 : 1);
    }
    close(ends[1]);
    children.push_back(child);
    pipes.push_back(ends[0]);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto idx = static_cast<std::size_t>(rank);
    std::string text;
    char buffer[1024];
    for (ssize_t got = 0; (got = read(pipes[idx], buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<std::size_t>(got));
    }
    close(pipes[idx]);
    int status = 0;
    EXPECT_EQ(waitpid(children[idx], &status, 0), children[idx]);
    bool may_die = false;
    for (const int one : dying) may_die = may_die || one == rank;
    const bool is_well = may_die || (WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_TRUE(is_well && text.empty())
        << "rank " << rank << " of " << num_ranks << ", status " << status << ":" << text;
  }
}

}  // namespace tradewind
