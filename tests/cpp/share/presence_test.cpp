#include "share/presence.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tradewind {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The board of all ranks, in one process.
struct Wall {
  std::mutex mutex;
  std::map<int, std::vector<std::string>> posts;
};

class RankBoard final : public Board {
 public:
  RankBoard(std::shared_ptr<Wall> wall, int rank) : wall_(std::move(wall)), rank_(rank) {}

  void post(const std::string& text) noexcept override {
    const std::scoped_lock lock(wall_->mutex);
    wall_->posts[rank_].push_back(text);
  }
  std::string read(int rank) noexcept override {
    const std::scoped_lock lock(wall_->mutex);
    const auto found = wall_->posts.find(rank);
    return found == wall_->posts.end() ? "" : found->second.back();
  }

 private:
  std::shared_ptr<Wall> wall_;
  int rank_;
};

class PresenceTest : public testing::Test {
 protected:
  std::unique_ptr<Presence> presence(int rank, milliseconds post_every = milliseconds(1)) {
    return std::make_unique<Presence>(std::make_shared<RankBoard>(wall_, rank), rank, 3,
                                      post_every);
  }
  // What a rank has posted, once its last post is that.
  std::vector<std::string> posts_up_to(int rank, const std::string& last) {
    const auto deadline = steady_clock::now() + std::chrono::seconds(10);
    while (steady_clock::now() < deadline) {
      {
        const std::scoped_lock lock(wall_->mutex);
        const auto& posts = wall_->posts[rank];
        if (!posts.empty() && posts.back() == last) return posts;
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    ADD_FAILURE() << "rank " << rank << " has not posted '" << last << "'";
    return {};
  }

  std::shared_ptr<Wall> wall_ = std::make_shared<Wall>();
};

TEST_F(PresenceTest, SaysWhatTheOthersSaidLast) {
  const auto first = presence(0);
  const auto second = presence(1);
  first->tell("forward");
  posts_up_to(0, "forward");
  EXPECT_EQ(second->others(), "rank 0 said last: forward; rank 2 said nothing");
  EXPECT_EQ(second->why_ended(), "");
}

TEST_F(PresenceTest, PostsTheNewestOfManyActivities) {
  const auto first = presence(0, milliseconds(300));
  first->tell("forward");
  posts_up_to(0, "forward");
  for (const char* activity : {"backward", "step", "forward", "backward"}) first->tell(activity);
  EXPECT_EQ(posts_up_to(0, "backward"), (std::vector<std::string>{"forward", "backward"}));
}

TEST_F(PresenceTest, AnEndIsThereAtOnceAndTheLastWord) {
  const auto first = presence(0);
  const auto second = presence(1);
  first->end("rank 0 raised ValueError");
  EXPECT_EQ(second->why_ended(), "rank 0 ended: rank 0 raised ValueError");
  first->end("another reason");
  first->leave("its process ended");
  first->tell("forward");
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(posts_up_to(0, "ended: rank 0 raised ValueError").size(), 1U);
}

TEST_F(PresenceTest, ARankThatLeavesHasNotEndedTheOthers) {
  const auto first = presence(0);
  const auto second = presence(1);
  first->leave("its process ended");
  EXPECT_EQ(second->why_ended(), "");
  EXPECT_EQ(second->others(), "rank 0 said last: its process ended; rank 2 said nothing");
}

TEST_F(PresenceTest, ALongPauseBetweenPostsHoldsNobodyUp) {
  const auto began = steady_clock::now();
  {
    const auto first = presence(0, std::chrono::hours(1));
    first->tell("forward");
    posts_up_to(0, "forward");
    first->tell("backward");
  }
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(5));
}

TEST(PresenceAlone, PostsNothing) {
  auto wall = std::make_shared<Wall>();
  Presence alone(std::make_shared<RankBoard>(wall, 0), 0, 1);
  alone.tell("forward");
  alone.end("nobody asks");
  EXPECT_TRUE(wall->posts.empty());
  EXPECT_EQ(alone.others(), "");
}

}  // namespace
}  // namespace tradewind
