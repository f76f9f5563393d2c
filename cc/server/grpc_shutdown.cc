#include "cc/server/grpc_shutdown.h"

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "cc/base/compat_server.h"
#include "cc/base/private_members.h"
#include "tensorflow/core/distributed_runtime/master.h"
#include "tensorflow/core/platform/logging.h"
#if STARWIRE_EAGER_PORT
#include "tensorflow/core/distributed_runtime/rpc/eager/grpc_eager_service_impl.h"
#else
#include "tensorflow/core/distributed_runtime/rpc/async_service_interface.h"
#endif

namespace starwire {
namespace {

using tensorflow::GrpcServer;
#if STARWIRE_EAGER_PORT
using tensorflow::eager::EagerServiceImpl;
using tensorflow::eager::GrpcEagerServiceImpl;
#endif

// GrpcServer::Stop() returns Unimplemented and has no hook, although every part of the server can be shut down. The
// parts are private.
STARWIRE_REACH(MuTag, GrpcServer::mu_);
STARWIRE_REACH(StateTag, GrpcServer::state_);
STARWIRE_REACH(ServerTag, GrpcServer::server_);
STARWIRE_REACH(MasterTag, GrpcServer::master_impl_);
STARWIRE_REACH(MasterServiceTag, GrpcServer::master_service_);
STARWIRE_REACH(WorkerServiceTag, GrpcServer::worker_service_);
STARWIRE_REACH(EagerServiceTag, GrpcServer::eager_service_);
STARWIRE_REACH(MasterThreadTag, GrpcServer::master_thread_);
STARWIRE_REACH(WorkerThreadTag, GrpcServer::worker_thread_);
STARWIRE_REACH(EagerThreadTag, GrpcServer::eager_thread_);
STARWIRE_REACH(CoordinationThreadTag, CoordinationThreadOwner::coordination_thread_);
STARWIRE_REACH(ClientsTag, ClientsOwner::grpc_worker_env_);
STARWIRE_REACH(CoordinationPoolTag, CoordinationPoolOwner::coordination_compute_pool_);
#if STARWIRE_EAGER_PORT
STARWIRE_REACH(EagerImplTag, GrpcEagerServiceImpl::local_impl_);
STARWIRE_REACH(EagerContextsMuTag, EagerServiceImpl::contexts_mu_);
STARWIRE_REACH(EagerContextsTag, EagerServiceImpl::contexts_);
#endif

// enum State { NEW, STARTED, STOPPED } of GrpcServer
enum class State { kNew = 0, kStarted = 1, kStopped = 2 };

// Also true of a server that was stopped before it was started, which its state does not show.
bool NeverStarted(GrpcServer* server) { return server->*Reach(MasterThreadTag()) == nullptr; }

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
  if (grpc != nullptr) ShutDownNow(grpc.get());
}

// Resets a member, unless GrpcServer does not have it in this version.
template <typename Owner, typename Server, typename Tag>
void Reset(Server* server, Tag tag) {
  if constexpr (std::is_same<Owner, Server>::value) (server->*Reach(tag)).reset();
}

#if STARWIRE_EAGER_PORT
template <typename Service>
EagerServiceImpl& ImplOf(Service* service) {
  return static_cast<GrpcEagerServiceImpl*>(service)->*Reach(EagerImplTag());
}

// Ends its two threads. A service that has contexts is kept: their functions may be running, and end in it.
void EndEagerService(GrpcServer* server) {
  auto*& service = server->*Reach(EagerServiceTag());
  if (service == nullptr) return;
  EagerServiceImpl& impl = ImplOf(service);
  {
    auto& mu = impl.*Reach(EagerContextsMuTag());
    mu.lock();
    const bool unused = (impl.*Reach(EagerContextsTag())).empty();
    mu.unlock();
    if (!unused) return;
  }
  delete service;
  service = nullptr;
}
#else
// Ends with the server.
void EndEagerService(GrpcServer*) {}
#endif

void EndCoordination(GrpcServer* server) {
  auto& mu = server->*Reach(MuTag());
  mu.lock();
  const bool started = StateOf(server) == State::kStarted;
  mu.unlock();
  if (started) StopCoordination(server).IgnoreError();
}

void EndServices(GrpcServer* server, bool eager_idle) {
  // Completion queues may be shut down only after their server. Each loop ends when its queue is drained; that of the
  // coordination service was told to end before.
  ShutDownService(server, MasterServiceTag());
  ShutDownService(server, WorkerServiceTag());
  ShutDownService(server, EagerServiceTag());
  // The destructors join the threads.
  (server->*Reach(MasterThreadTag())).reset();
  (server->*Reach(WorkerThreadTag())).reset();
  (server->*Reach(EagerThreadTag())).reset();
  Reset<CoordinationThreadOwner>(server, CoordinationThreadTag());
  // It runs requests that the service has yet to answer, so it ends after the service's loop.
  Reset<CoordinationPoolOwner>(server, CoordinationPoolTag());
  if (eager_idle) EndEagerService(server);
}

// gRPC puts events into a server's queues from the beginning, and aborts the process when a queue that is not empty is
// destroyed. The queues of a server that never started were not polled, and the loops that could poll them stop at
// their alarm, not at the end of the queue. So the rest of such a server, some 300 KB, is leaked.
void KeepUnstarted(GrpcServer* server) { (server->*Reach(ServerTag())).release(); }

// gRPC may wait for something that never happens, and then the caller must not wait with it.
Status Bounded(int64_t timeout_ms, std::function<void()> work) {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> finished = done->get_future();
  std::thread thread;
  try {
    thread = std::thread([work = std::move(work), done] {
      work();
      done->set_value();
    });
  } catch (const std::system_error& error) {
    return MakeStatus(kResourceExhausted,
                      std::string("cannot start a thread to shut down TensorFlow's gRPC: ") + error.what());
  }
  if (finished.wait_for(std::chrono::milliseconds(timeout_ms)) != std::future_status::ready) {
    thread.detach();
    return MakeStatus(kDeadlineExceeded,
                      "TensorFlow's gRPC did not shut down within " + std::to_string(timeout_ms) + " ms");
  }
  thread.join();
  return OkStatus();
}

}  // namespace

#if STARWIRE_EAGER_PORT
EagerServiceImpl* EagerServiceOf(GrpcServer* server) {
  auto* service = server->*Reach(EagerServiceTag());
  return service == nullptr ? nullptr : &ImplOf(service);
}
#endif

Status SignOff(GrpcServer* server, int64_t timeout_ms) {
  return Bounded(timeout_ms, [server] { EndCoordination(server); });
}

Status ShutDownGrpcServer(GrpcServer* server, bool eager_idle, int64_t timeout_ms) {
  return Bounded(timeout_ms, [server, eager_idle] {
    // Before the port closes: its agent signs off over it.
    EndCoordination(server);
    auto& mu = server->*Reach(MuTag());
    mu.lock();
    ClosePort(server);
    if (StateOf(server) == State::kStarted) {
      EndServices(server, eager_idle);
    } else if (NeverStarted(server)) {
      KeepUnstarted(server);
    }
    SetState(server, State::kStopped);
    mu.unlock();
  });
}

Status EndGrpcClients(GrpcServer* server, int64_t timeout_ms) {
  return Bounded(timeout_ms, [server] { Reset<ClientsOwner>(server, ClientsTag()); });
}

std::unique_ptr<tensorflow::Master> ReleaseMaster(GrpcServer* server) { return std::move(server->*Reach(MasterTag())); }

}  // namespace starwire
