// Stopping a whole server, and what it refuses afterwards.
#include "cc/server/server.h"

#include <memory>
#include <string>

#include "cc/base/compat_server.h"
#include "tests/cc/shim/rig.h"

namespace starwire {
namespace {

// DeepRec can be built with protocols of our names. They are registered before a library is loaded, as this one is.
class Native : public tensorflow::ServerFactory {
 public:
  bool AcceptsOptions(const tensorflow::ServerDef& def) override { return def.protocol() == "grpc+verbs"; }
  Status NewServer(const tensorflow::ServerDef&, const Options&, std::unique_ptr<tensorflow::ServerInterface>*) {
    return MakeStatus(12, "the native server");
  }
  Status NewServer(const tensorflow::ServerDef&, std::unique_ptr<tensorflow::ServerInterface>*) {
    return MakeStatus(12, "the native server");
  }
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wprio-ctor-dtor"
// Before cc/server/init.cc, whose number is 101.
__attribute__((constructor(100))) void RegisterNative() { RegisterServerFactory("NATIVE_VERBS_SERVER", new Native); }
#pragma GCC diagnostic pop

tensorflow::ServerFactory* FactoryOf(const std::string& protocol) {
  tensorflow::ServerDef def;
  def.set_protocol(protocol);
  tensorflow::ServerFactory* factory = nullptr;
  EXPECT_TRUE(tensorflow::ServerFactory::GetFactory(def, &factory).ok()) << protocol;
  return factory;
}

TEST(Protocols, ATakenNameStaysWithItsOwnerAndThePrefixIsOurs) {
  const auto is_native = [](tensorflow::ServerFactory* factory) { return dynamic_cast<Native*>(factory) != nullptr; };
  EXPECT_TRUE(is_native(FactoryOf("grpc+verbs")));
  EXPECT_FALSE(is_native(FactoryOf("starwire+grpc+verbs")));
  EXPECT_NE(FactoryOf("starwire+grpc+verbs"), FactoryOf("grpc"));
  for (const std::string name : {"grpc++", "star_server", "star_server_lite"}) {
    EXPECT_EQ(FactoryOf(name), FactoryOf("starwire+" + name));
    EXPECT_NE(FactoryOf(name), FactoryOf("grpc"));
  }
}

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
