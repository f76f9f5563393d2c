#include "cc/server/grpc_shutdown.h"

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "grpcpp/server.h"
#include "tensorflow/core/distributed_runtime/master.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {
namespace {

using tensorflow::GrpcServer;

// GrpcServer::Stop() answers Unimplemented and has no hook, although every piece that it would need can be shut down.
// The pieces are private; an explicit instantiation may name private members (C++17 [temp.spec]/6), which is how they
// are reached here, by name and type, so that a TensorFlow without one of them does not compile instead of misbehaving.
template <typename Tag, auto kMember>
struct Expose {
  friend auto Reach(Tag) { return kMember; }
};
#define STARWIRE_REACH(name, member) \
  struct name {                      \
    friend auto Reach(name);         \
  };                                 \
  template struct Expose<name, &GrpcServer::member>

STARWIRE_REACH(MuTag, mu_);
STARWIRE_REACH(StateTag, state_);
STARWIRE_REACH(ServerTag, server_);
STARWIRE_REACH(MasterTag, master_impl_);
STARWIRE_REACH(MasterServiceTag, master_service_);
STARWIRE_REACH(WorkerServiceTag, worker_service_);
STARWIRE_REACH(EagerServiceTag, eager_service_);
STARWIRE_REACH(CoordinationServiceTag, coordination_service_);
STARWIRE_REACH(MasterThreadTag, master_thread_);
STARWIRE_REACH(WorkerThreadTag, worker_thread_);
STARWIRE_REACH(EagerThreadTag, eager_thread_);
STARWIRE_REACH(CoordinationThreadTag, coordination_thread_);
STARWIRE_REACH(ClientsTag, grpc_worker_env_);

#undef STARWIRE_REACH

// enum State { NEW, STARTED, STOPPED } of GrpcServer
enum class State { kNew = 0, kStarted = 1, kStopped = 2 };

State StateOf(GrpcServer* server) { return static_cast<State>(server->*Reach(StateTag())); }

void SetState(GrpcServer* server, State state) {
  auto& member = server->*Reach(StateTag());
  member = static_cast<std::decay_t<decltype(member)>>(state);
}

template <typename Tag>
void ShutDownService(GrpcServer* server, Tag tag) {
  auto* service = server->*Reach(tag);
  if (service != nullptr) service->Shutdown();
}

void ClosePort(GrpcServer* server) {
  auto& grpc = server->*Reach(ServerTag());
  if (grpc == nullptr) return;
  // A deadline in the past: calls under way are cancelled at once.
  const gpr_timespec now_at_the_latest = {0, 0, GPR_CLOCK_MONOTONIC};
  static_cast<::grpc::ServerInterface*>(grpc.get())->Shutdown(now_at_the_latest);
}

void EndServices(GrpcServer* server) {
  // Completion queues may be shut down only after their server. Each loop ends when its queue is drained.
  ShutDownService(server, MasterServiceTag());
  ShutDownService(server, WorkerServiceTag());
  ShutDownService(server, EagerServiceTag());
  ShutDownService(server, CoordinationServiceTag());
  // Their destructors join.
  (server->*Reach(MasterThreadTag())).reset();
  (server->*Reach(WorkerThreadTag())).reset();
  (server->*Reach(EagerThreadTag())).reset();
  (server->*Reach(CoordinationThreadTag())).reset();
}

// What gRPC waits for may never happen, and then nobody must wait with it.
Status Bounded(int64_t timeout_ms, std::function<void()> work) {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> finished = done->get_future();
  std::thread thread([work = std::move(work), done] {
    work();
    done->set_value();
  });
  if (finished.wait_for(std::chrono::milliseconds(timeout_ms)) != std::future_status::ready) {
    thread.detach();
    return MakeStatus(4, "TensorFlow's gRPC did not end within " + std::to_string(timeout_ms) + " ms");
  }
  thread.join();
  return OkStatus();
}

}  // namespace

Status ShutDownGrpcServer(GrpcServer* server, int64_t timeout_ms) {
  // The completion queues of a server that never started were never polled: only its port is closed.
  return Bounded(timeout_ms, [server] {
    auto& mu = server->*Reach(MuTag());
    mu.lock();
    ClosePort(server);
    if (StateOf(server) == State::kStarted) EndServices(server);
    SetState(server, State::kStopped);
    mu.unlock();
  });
}

Status EndGrpcClients(GrpcServer* server, int64_t timeout_ms) {
  return Bounded(timeout_ms, [server] { (server->*Reach(ClientsTag())).reset(); });
}

std::unique_ptr<tensorflow::Master> ReleaseMaster(GrpcServer* server) { return std::move(server->*Reach(MasterTag())); }

}  // namespace starwire
