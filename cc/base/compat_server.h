// The differences between the servers and workers of TensorFlow 1.15, DeepRec and 2.12 to 2.22: see compat.h.
#ifndef STARWIRE_CC_BASE_COMPAT_SERVER_H_
#define STARWIRE_CC_BASE_COMPAT_SERVER_H_

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "cc/base/compat.h"
#include "grpcpp/server.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"
#include "tensorflow/core/distributed_runtime/server_lib.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"

// 1.15 has neither a coordination service nor device managers that can change.
namespace tensorflow {
class CoordinationClientCache;
class DynamicDeviceMgr;
class EagerContext;
}  // namespace tensorflow

namespace starwire {

// From 2.12 to 2.18, each of TensorFlow's two libraries has a copy of ServerFactory with its own registry, and
// TF_NewServer uses the one that our calls are not bound to: register in every distinct copy. 1.15, and 2.19 and later,
// have one.
inline void RegisterServerFactory(const std::string& name, ::tensorflow::ServerFactory* factory) {
  using Register = void (*)(const std::string&, ::tensorflow::ServerFactory*);
  constexpr char kSymbol[] =
      "_ZN10tensorflow13ServerFactory8RegisterERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPS0_";
  constexpr const char* kLibraries[] = {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2"};
  void* done = nullptr;
  for (const char* library : kLibraries) {
    void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr) continue;
    void* symbol = dlsym(handle, kSymbol);
    if (symbol != nullptr && symbol != done) {
      reinterpret_cast<Register>(symbol)(name, factory);
      done = symbol;
    }
    dlclose(handle);
  }
  if (done == nullptr) ::tensorflow::ServerFactory::Register(name, factory);
}

// ---- ServerFactory ----

namespace compat_internal {
template <typename F, typename = void>
struct FactoryOptions {
  struct Type {
    ::tensorflow::DeviceMgr* local_device_mgr = nullptr;
  };
};
template <typename F>
struct FactoryOptions<F, std::void_t<typename F::Options>> {
  using Type = typename F::Options;
};
}  // namespace compat_internal

// What a factory is asked for besides the ServerDef. 1.15 asks for nothing.
using FactoryOptions = compat_internal::FactoryOptions<::tensorflow::ServerFactory>::Type;

namespace compat_internal {
template <typename Later, typename Early, typename = void>
struct DeviceMgrOf {
  using Type = Early;
};
template <typename Later, typename Early>
struct DeviceMgrOf<Later, Early, std::void_t<decltype(sizeof(Later))>> {
  using Type = Later;
};
}  // namespace compat_internal

// One with given devices: DeviceMgr is abstract from 2.x on.
using OwnDeviceMgr = compat_internal::DeviceMgrOf<::tensorflow::DynamicDeviceMgr, ::tensorflow::DeviceMgr>::Type;

// Whether a server can be given devices: in 1.15 it makes its own.
template <typename Options>
bool CanUseDevices(const Options& options) {
  return Either(STARWIRE_IF_VALID((const auto& o), (void(o.local_device_mgr), true)), Otherwise(false))(options);
}
template <typename Options, typename Devices>
void UseDevices(Options* options, Devices* devices) {
  Either(STARWIRE_IF_VALID((auto* o, auto* d), o->local_device_mgr = d), OtherwiseNothing())(options, devices);
}

// ---- ServerDef ----

// The replica of its job that a server belongs to. Early versions (1.15, 2.12) have only one.
template <typename ServerDef>
int ReplicaOf(const ServerDef& def) {
  return Either(STARWIRE_IF_VALID((const auto& d), d.replica()), Otherwise(0))(def);
}

// The port that a server asks for; 0: that of its task, which is all that 1.15 knows.
template <typename ServerDef>
int PortOf(const ServerDef& def) {
  return Either(STARWIRE_IF_VALID((const auto& d), static_cast<int>(d.port())), Otherwise(0))(def);
}

// ---- Methods of servers and workers that some versions lack ----

// Classes of ours declare these methods without `override`: where TensorFlow's class has no such method, theirs is an
// ordinary one, which nobody calls.

namespace compat_internal {
template <typename S, typename = void>
struct ContextId {
  using Type = uint64_t;
};
template <typename S>
struct ContextId<S, std::void_t<decltype(&S::AddMasterEagerContextToEagerService)>> {
  using Type = typename Method<decltype(&S::AddMasterEagerContextToEagerService)>::Argument;
};

inline Status NotThere(const char* method) {
  return MakeStatus(kUnimplemented, std::string("this version of TensorFlow has no ") + method);
}
template <typename Base, typename... Args>
auto StockUpdate(Base* server, int, const Args&... args) -> decltype(server->Base::UpdateServerDef(args...)) {
  return server->Base::UpdateServerDef(args...);
}
template <typename Base, typename... Args>
Status StockUpdate(Base*, long, const Args&...) {
  return NotThere("UpdateServerDef");
}
template <typename Base>
auto StockStopCoordination(Base* server, int) -> decltype(server->Base::StopCoordinationService()) {
  return server->Base::StopCoordinationService();
}
template <typename Base>
Status StockStopCoordination(Base*, long) {
  return OkStatus();
}
}  // namespace compat_internal

// The id of an eager context: a 64-bit unsigned integer, whose name depends on the version.
using ContextId = compat_internal::ContextId<::tensorflow::ServerInterface>::Type;

inline Status StockUpdateServerDef(::tensorflow::GrpcServer* server, const ::tensorflow::ServerDef& def) {
  return compat_internal::StockUpdate(server, 0, def);
}
inline Status StockStopCoordination(::tensorflow::GrpcServer* server) {
  return compat_internal::StockStopCoordination(server, 0);
}
// Calls the overridden method.
inline Status StopCoordination(::tensorflow::GrpcServer* server) {
  return Either(STARWIRE_IF_VALID((auto* s), s->StopCoordinationService()), Otherwise(OkStatus()))(server);
}
template <typename Cache, typename Clients>
Status CoordinationClients(Cache* cache, Clients* clients) {
  return Either(STARWIRE_IF_VALID((auto* cache, auto* clients), cache->GetCoordinationClientCache(clients)),
                Otherwise(compat_internal::NotThere("coordination service")))(cache, clients);
}

// ---- GetStatusAsync ----

// The status of a task in this process. 1.15 and DeepRec take no options.
template <typename Worker, typename Request, typename Response, typename Done>
void AnswerStatus(Worker* worker, ::tensorflow::CallOptions* opts, const Request* request, Response* response,
                  const Done& done) {
  Either(STARWIRE_IF_VALID((auto* w, auto* o, auto* q, auto* r, const auto& d),
                           w->GetStatusAsync(o, q, r, /*fail_fast=*/true, d)),
         STARWIRE_IF_VALID((auto* w, auto*, auto* q, auto* r, const auto& d), w->GetStatusAsync(q, r, d)))(
      worker, opts, request, response, done);
}

// ---- Rendezvous and collectives ----

// Without a cancellation manager, which 1.15 does not take.
template <typename Rendezvous, typename... Rest>
void ConsumeBuf(Rendezvous* rendezvous, Rest&&... rest) {
  Either(STARWIRE_IF_VALID((auto* r, auto&&... rest), r->ConsumeBuf(std::forward<decltype(rest)>(rest)..., nullptr)),
         STARWIRE_IF_VALID((auto* r, auto&&... rest), r->ConsumeBuf(std::forward<decltype(rest)>(rest)...)))(
      rendezvous, std::forward<Rest>(rest)...);
}

// ---- Eager clients ----

// The call with limits: some versions have a timeout (2.14), some also a number of retries, some (2.12) neither. None
// is given limits that it does not have.
template <typename Client, typename Request, typename Response, typename Done, typename... Limits>
void CreateEagerContext(Client* client, const Request* request, Response* response, Done done, Limits... limits) {
  Either(STARWIRE_IF_VALID((auto* c, const auto&... all), c->CreateContextAsync(all...)),
         [](auto* c, auto* request, auto* response, const auto& done, auto...) {
           c->CreateContextAsync(request, response, done);
         })(client, request, response, done, limits...);
}

// ---- Private members that some versions lack ----

// STARWIRE_OWNER(member_): OwnerOf_member_ is GrpcServer if it has the member, else a stand-in that has it. The name is
// ambiguous in a class that inherits it from two bases, even if one of them keeps it private.
#define STARWIRE_OWNER(member)                                         \
  struct No_##member {                                                 \
    int member = 0;                                                    \
  };                                                                   \
  struct OwnOrNo_##member : ::tensorflow::GrpcServer, No_##member {};  \
  template <typename T>                                                \
  auto FindOwnerOf_##member(int)->decltype(&T::member, No_##member()); \
  template <typename T>                                                \
  ::tensorflow::GrpcServer FindOwnerOf_##member(...);                  \
  using OwnerOf_##member = decltype(FindOwnerOf_##member<OwnOrNo_##member>(0))

namespace compat_internal {
STARWIRE_OWNER(coordination_compute_pool_);
STARWIRE_OWNER(coordination_thread_);
STARWIRE_OWNER(grpc_worker_env_);
}  // namespace compat_internal
#undef STARWIRE_OWNER

// GrpcServer in newer versions (2.21 has it, 2.18 does not).
using CoordinationPoolOwner = compat_internal::OwnerOf_coordination_compute_pool_;
// GrpcServer, but not in 1.15.
using CoordinationThreadOwner = compat_internal::OwnerOf_coordination_thread_;
using ClientsOwner = compat_internal::OwnerOf_grpc_worker_env_;

// Closes a gRPC server's port, and cancels its calls at once: the deadline is in the past. Without gRPC's headers
// (1.15) there is only the virtual function behind Shutdown().
template <typename Server>
void ShutDownNow(Server* server) {
  Either(STARWIRE_IF_VALID((auto* s, auto deadline), s->Shutdown(deadline)),
         STARWIRE_IF_VALID((auto* s, auto deadline), s->ShutdownInternal(deadline)))(
      server, gpr_timespec{0, 0, GPR_CLOCK_MONOTONIC});
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_SERVER_H_
