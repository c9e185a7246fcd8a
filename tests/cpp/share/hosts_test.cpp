#include "share/hosts.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace tradewind {
namespace {

TEST(Hosts, ComeInTheOrderOfTheirFirstRanks) {
  const Hosts hosts = Hosts::make({"b", "a", "a", "b"});
  EXPECT_EQ(hosts.num_hosts(), 2);
  EXPECT_TRUE(hosts.is_even());
  EXPECT_EQ(hosts.ranks_of(0), (std::vector<int>{0, 3}));
  EXPECT_EQ(hosts.ranks_of(1), (std::vector<int>{1, 2}));
  EXPECT_EQ(hosts.host_of(3), 0);
  EXPECT_EQ(hosts.place_of(3), 1);
}

TEST(Hosts, RanksOfOnePlaceAreOpposite) {
  const Hosts hosts = Hosts::make({"a", "a", "b", "b"});
  EXPECT_TRUE(hosts.are_opposite(0, 2));
  EXPECT_TRUE(hosts.are_opposite(3, 1));
  EXPECT_FALSE(hosts.are_opposite(0, 3));
  EXPECT_FALSE(hosts.are_opposite(0, 1));
  EXPECT_FALSE(hosts.are_opposite(0, 0));
}

TEST(Hosts, MayHaveDifferentNumbersOfRanks) {
  EXPECT_FALSE(Hosts::make({"a", "b", "b"}).is_even());
  EXPECT_TRUE(Hosts::make({"a", "b", "c"}).is_even());
}

TEST(Hosts, ApartMeansThatAllAreOpposite) {
  const Hosts hosts = Hosts::apart(3);
  EXPECT_EQ(hosts.num_hosts(), 3);
  EXPECT_TRUE(hosts.are_opposite(0, 2));
}

TEST(Hosts, ExpectAKeyForEveryRank) { EXPECT_THROW(Hosts::make({"a", ""}), Error); }

}  // namespace
}  // namespace tradewind
