// A directory of its own for each test, removed with all that is in it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace tradewind {

class TemporaryDirectory : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "tradewind-XXXXXX";
    ASSERT_NE(mkdtemp(path_.data()), nullptr) << path_;
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  [[nodiscard]] const std::string& directory() const { return path_; }
  [[nodiscard]] std::string at(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace tradewind
