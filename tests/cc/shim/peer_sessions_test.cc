// The state of a task's earlier incarnations that is dropped when a new one connects, and the state that is kept.
#include "cc/worker/peer_sessions.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace starwire {
namespace {

constexpr char kTask[] = "/job:worker/replica:0/task:0";

class PeerSessionsTest : public ::testing::Test {
 protected:
  std::vector<std::string> dropped_;  // in order: graphs and sessions, with their task
  PeerSessions peer_sessions_{[this](const std::string& task, bool is_back, PeerSessions::Registered registered) {
    for (const auto& graph : registered.graphs) dropped_.push_back(task + " graph " + graph.first);
    for (const auto& session : registered.sessions) dropped_.push_back(task + " session " + session);
    dropped_.push_back(is_back ? "it is back" : "it is lost");
  }};
};

TEST_F(PeerSessionsTest, AnEndedIncarnationIsDroppedWhenTheNextOneConnects) {
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "g1", "s", true);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "g2", "s", true);
  peer_sessions_.SessionCreated(peer_sessions_.PeerOf(1), "s");
  peer_sessions_.GraphDeregistered(1, "g2");
  peer_sessions_.PeerDisconnected(1);
  EXPECT_TRUE(dropped_.empty()) << "the process may still be there";
  peer_sessions_.PeerConnected(2, kTask, 200);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph g1", std::string(kTask) + " session s",
                                                "it is back"}));
  peer_sessions_.PeerDisconnected(2);
  peer_sessions_.PeerConnected(3, kTask, 300);
  EXPECT_EQ(dropped_.size(), 3u) << "once";
}

TEST_F(PeerSessionsTest, AReconnectingProcessKeepsItsState) {
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "g", "", false);
  peer_sessions_.PeerDisconnected(1);
  peer_sessions_.PeerConnected(2, kTask, 100);
  // State registered through the new connection counts as well.
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(2), "h", "", false);
  peer_sessions_.GraphDeregistered(2, "g");
  peer_sessions_.PeerDisconnected(2);
  EXPECT_TRUE(dropped_.empty());
  peer_sessions_.PeerConnected(3, kTask, 101);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph h", "it is back"}));
}

TEST_F(PeerSessionsTest, ARegistrationMayOutliveItsConnection) {
  peer_sessions_.PeerConnected(1, kTask, 100);
  const PeerSessions::Peer peer = peer_sessions_.PeerOf(1);
  peer_sessions_.PeerDisconnected(1);
  peer_sessions_.GraphRegistered(peer, "g", "s", true);
  EXPECT_TRUE(dropped_.empty()) << "the process may still be there";
  peer_sessions_.PeerConnected(2, kTask, 200);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph g", "it is back"}));
  peer_sessions_.SessionCreated(peer, "s");
  EXPECT_EQ(dropped_.size(), 4u) << "at once: nobody can use it";
  EXPECT_EQ(dropped_[2], std::string(kTask) + " session s");
}

// A stopped process may wake up after another took its place: while both are connected, neither loses its state.
TEST_F(PeerSessionsTest, TwoConnectedIncarnationsKeepTheirState) {
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "old", "", false);
  peer_sessions_.PeerConnected(2, kTask, 200);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(2), "new", "", false);
  EXPECT_TRUE(dropped_.empty());
  peer_sessions_.PeerDisconnected(1);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph old", "it is back"}));
}

TEST_F(PeerSessionsTest, OtherTasksAreUnaffected) {
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "g", "", false);
  peer_sessions_.PeerDisconnected(1);
  peer_sessions_.PeerConnected(2, "/job:worker/replica:0/task:00", 200);
  peer_sessions_.PeerConnected(3, "/job:ps/replica:0/task:0", 300);
  peer_sessions_.PeerDisconnected(2);
  peer_sessions_.PeerDisconnected(3);
  EXPECT_TRUE(dropped_.empty());
}

TEST_F(PeerSessionsTest, WhoeverIsGoneForLongIsLost) {
  const std::string other = "/job:worker/replica:0/task:1";
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.SessionCreated(peer_sessions_.PeerOf(1), "s");
  peer_sessions_.PeerConnected(2, other, 200);
  peer_sessions_.SessionCreated(peer_sessions_.PeerOf(2), "t");
  peer_sessions_.PeerDisconnected(1);
  peer_sessions_.PeerConnected(3, "/job:worker/replica:0/task:2", 300);
  EXPECT_TRUE(dropped_.empty()) << "it may come back";
  peer_sessions_.SetIdleLimit(std::chrono::seconds(0));
  peer_sessions_.PeerDisconnected(3);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " session s", "it is lost"}))
      << "whoever is connected keeps its sessions";
}

TEST_F(PeerSessionsTest, TheGraphsOfAWorkerSessionGoWithIt) {
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.SessionCreated(peer_sessions_.PeerOf(1), "s");
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "its own", "s", true);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "another's", "t", true);
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(1), "of all", "s", false);
  peer_sessions_.SessionDeleted(1, "s");
  peer_sessions_.PeerConnected(2, kTask, 200);
  peer_sessions_.PeerDisconnected(1);
  EXPECT_EQ(dropped_, (std::vector<std::string>{std::string(kTask) + " graph another's",
                                                std::string(kTask) + " graph of all", "it is back"}));
}

TEST_F(PeerSessionsTest, EventsOfUnknownPeersAreIgnored) {
  peer_sessions_.GraphRegistered(peer_sessions_.PeerOf(9), "g", "", false);
  peer_sessions_.GraphDeregistered(9, "g");
  peer_sessions_.SessionCreated(peer_sessions_.PeerOf(9), "s");
  peer_sessions_.SessionDeleted(9, "s");
  peer_sessions_.PeerDisconnected(9);
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.PeerConnected(1, kTask, 100);
  peer_sessions_.PeerDisconnected(1);
  peer_sessions_.PeerConnected(2, kTask, 200);
  EXPECT_TRUE(dropped_.empty());
}

}  // namespace
}  // namespace starwire
