// The state of a task's earlier incarnations that is dropped when a new one connects, and the state that is kept.
#include "cc/worker/leftovers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace starwire {
namespace {

constexpr char kTask[] = "/job:worker/replica:0/task:0";

class LeftoversTest : public ::testing::Test {
 protected:
  std::vector<std::string> dropped_;  // in order: graphs and sessions, with their task
  Leftovers leftovers_{[this](const std::string& task, bool is_back, Leftovers::Life life) {
    for (const auto& graph : life.graphs) dropped_.push_back(task + " graph " + graph.first);
    for (const auto& session : life.sessions) dropped_.push_back(task + " session " + session);
    dropped_.push_back(is_back ? "it is back" : "it is lost");
  }};
};

TEST_F(LeftoversTest, AnEndedIncarnationIsDroppedWhenTheNextOneConnects) {
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.GraphRegistered(1, "g1", "s", true);
  leftovers_.GraphRegistered(1, "g2", "s", true);
  leftovers_.SessionCreated(1, "s");
  leftovers_.GraphDeregistered(1, "g2");
  leftovers_.PeerGone(1);
  EXPECT_TRUE(dropped_.empty()) << "the process may still be there";
  leftovers_.PeerCame(2, kTask, 200);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph g1", std::string(kTask) + " session s",
                                                "it is back"}));
  leftovers_.PeerGone(2);
  leftovers_.PeerCame(3, kTask, 300);
  EXPECT_EQ(dropped_.size(), 3u) << "once";
}

TEST_F(LeftoversTest, AReconnectingProcessKeepsItsState) {
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.GraphRegistered(1, "g", "", false);
  leftovers_.PeerGone(1);
  leftovers_.PeerCame(2, kTask, 100);
  // State registered through the new connection counts as well.
  leftovers_.GraphRegistered(2, "h", "", false);
  leftovers_.GraphDeregistered(2, "g");
  leftovers_.PeerGone(2);
  EXPECT_TRUE(dropped_.empty());
  leftovers_.PeerCame(3, kTask, 101);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph h", "it is back"}));
}

// A stopped process may wake up after another took its place: while both are connected, neither loses its state.
TEST_F(LeftoversTest, TwoConnectedIncarnationsKeepTheirState) {
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.GraphRegistered(1, "old", "", false);
  leftovers_.PeerCame(2, kTask, 200);
  leftovers_.GraphRegistered(2, "new", "", false);
  EXPECT_TRUE(dropped_.empty());
  leftovers_.PeerGone(1);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph old", "it is back"}));
}

TEST_F(LeftoversTest, OtherTasksAreUnaffected) {
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.GraphRegistered(1, "g", "", false);
  leftovers_.PeerGone(1);
  leftovers_.PeerCame(2, "/job:worker/replica:0/task:00", 200);
  leftovers_.PeerCame(3, "/job:ps/replica:0/task:0", 300);
  leftovers_.PeerGone(2);
  leftovers_.PeerGone(3);
  EXPECT_TRUE(dropped_.empty());
}

TEST_F(LeftoversTest, WhoeverIsGoneForLongIsLost) {
  const std::string other = "/job:worker/replica:0/task:1";
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.SessionCreated(1, "s");
  leftovers_.PeerCame(2, other, 200);
  leftovers_.SessionCreated(2, "t");
  leftovers_.PeerGone(1);
  leftovers_.PeerCame(3, "/job:worker/replica:0/task:2", 300);
  EXPECT_TRUE(dropped_.empty()) << "it may come back";
  leftovers_.SetPatience(std::chrono::seconds(0));
  leftovers_.PeerGone(3);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " session s", "it is lost"}))
      << "whoever is connected keeps its sessions";
}

TEST_F(LeftoversTest, EventsOfUnknownPeersAreIgnored) {
  leftovers_.GraphRegistered(9, "g", "", false);
  leftovers_.GraphDeregistered(9, "g");
  leftovers_.SessionCreated(9, "s");
  leftovers_.SessionDeleted(9, "s");
  leftovers_.PeerGone(9);
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.PeerCame(1, kTask, 100);
  leftovers_.PeerGone(1);
  leftovers_.PeerCame(2, kTask, 200);
  EXPECT_TRUE(dropped_.empty());
}

}  // namespace
}  // namespace starwire
