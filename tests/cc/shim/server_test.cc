// Stopping a whole server, and what it refuses afterwards.
#include "cc/server/server.h"

#include <memory>
#include <string>

#include "tests/cc/shim/rig.h"

namespace starwire {
namespace {

std::unique_ptr<tensorflow::ServerInterface> NewServer() {
  std::unique_ptr<tensorflow::ServerInterface> server;
  EXPECT_TRUE(StarwireServer::Create("grpc++", LonelyServer(), tensorflow::ServerFactory::Options(), &server).ok());
  return server;
}

TEST(Server, TheSecondStopTakesEffect) {
  auto server = NewServer();
  ASSERT_TRUE(server->Start().ok());
  EXPECT_EQ(StatusNumber(server->Stop()), 12);
  EXPECT_TRUE(server->Stop().ok());
  EXPECT_TRUE(server->Stop().ok());
  EXPECT_TRUE(server->Join().ok());
}

TEST(Server, AServerThatNeverStartedStopsAtOnce) {
  auto server = NewServer();
  EXPECT_TRUE(server->Stop().ok());
}

TEST(Server, AStoppedServerTakesNoEagerContext) {
  auto server = NewServer();
  ASSERT_TRUE(server->Start().ok());
  ASSERT_TRUE(static_cast<StarwireServer*>(server.get())->ShutDown().ok());
  // Its eager service is gone; without the refusal this would crash.
  const Status refused = server->AddMasterEagerContextToEagerService(7, nullptr);
  EXPECT_EQ(StatusNumber(refused), 9);
  EXPECT_NE(StatusMessage(refused).find("was stopped"), std::string::npos) << refused;
  EXPECT_EQ(StatusNumber(server->UpdateServerDef(tensorflow::ServerDef())), 9);
  EXPECT_TRUE(server->StopCoordinationService().ok());
}

}  // namespace
}  // namespace starwire
