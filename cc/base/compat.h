// The differences between TensorFlow 2.12 and 2.21. Types are deduced from TensorFlow's own declarations where
// possible, so that a new version usually needs no change here. Only cc/base/compat.* may test the version.
//
// Passed by the build: STARWIRE_TF_VERSION, the exact version as a string literal ("2.21.0"), and STARWIRE_TF_MINOR,
// major * 100 + minor (221). Headers of 2.20 and later no longer define TF_MINOR_VERSION.
#ifndef STARWIRE_CC_BASE_COMPAT_H_
#define STARWIRE_CC_BASE_COMPAT_H_

#ifndef NDEBUG
#error \
    "compile with -DNDEBUG: TensorFlow's wheels are built with it, and some of its classes have a different layout without it"
#endif
#if !defined(STARWIRE_TF_VERSION) || !defined(STARWIRE_TF_MINOR)
#error "pass -DSTARWIRE_TF_VERSION=\"x.y.z\" and -DSTARWIRE_TF_MINOR=xyy for the TensorFlow that the headers belong to"
#endif
#if STARWIRE_TF_MINOR < 212 || STARWIRE_TF_MINOR > 221
#error "starwire supports TensorFlow 2.12 to 2.21"
#endif

#include <dlfcn.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/rendezvous_mgr_interface.h"
#include "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"
#include "tensorflow/core/distributed_runtime/server_lib.h"
#include "tensorflow/core/lib/core/errors.h"
#include "tensorflow/core/lib/core/status.h"

namespace starwire {

// ---- Status ----

// tsl::Status in 2.12, absl::Status from 2.13 on.
using Status = decltype(std::declval<::tensorflow::ServerInterface&>().Start());
using StatusCode = std::decay_t<decltype(std::declval<const Status&>().code())>;

inline Status OkStatus() { return Status(); }

namespace compat_internal {
template <typename S>
auto Message(const S& status, int) -> decltype(std::string(status.message())) {
  return std::string(status.message());
}
template <typename S>
auto Message(const S& status, long) -> decltype(std::string(status.error_message())) {
  return std::string(status.error_message());
}
// Details are cords from 2.13 on, strings before.
template <typename S>
auto SetPayload(S* status, absl::string_view url, absl::string_view value, int)
    -> decltype(status->SetPayload(url, absl::Cord(value))) {
  return status->SetPayload(url, absl::Cord(value));
}
template <typename S>
auto SetPayload(S* status, absl::string_view url, absl::string_view value, long)
    -> decltype(status->SetPayload(url, value)) {
  return status->SetPayload(url, value);
}
}  // namespace compat_internal

inline std::string StatusMessage(const Status& status) { return compat_internal::Message(status, 0); }

inline void SetStatusPayload(Status* status, absl::string_view url, absl::string_view value) {
  compat_internal::SetPayload(status, url, value, 0);
}

// The code as it is sent: the same number in tensorflow::error::Code, absl::StatusCode and sw_code.
inline int StatusNumber(const Status& status) { return static_cast<int>(status.code()); }

inline constexpr int kCancelled = 1;
inline constexpr int kUnknown = 2;
inline constexpr int kInvalidArgument = 3;
inline constexpr int kDeadlineExceeded = 4;
inline constexpr int kResourceExhausted = 8;
inline constexpr int kFailedPrecondition = 9;
inline constexpr int kAborted = 10;
inline constexpr int kUnimplemented = 12;
inline constexpr int kInternal = 13;
inline constexpr int kUnavailable = 14;
inline constexpr int kDataLoss = 15;
inline constexpr int kLastStatusNumber = 16;

// Codes that no version of TensorFlow knows become Unknown, so that a peer cannot create a status that cannot be
// printed.
inline Status MakeStatus(int code, const std::string& message) {
  if (code == 0) return Status();
  return Status(static_cast<StatusCode>(code < 0 || code > kLastStatusNumber ? kUnknown : code), message);
}

// ---- Rendezvous ----

namespace compat_internal {
template <typename M>
struct Method;
template <typename C, typename R, typename A>
struct Method<R (C::*)(A)> {
  using Argument = A;
  using Result = R;
};
template <typename C, typename R, typename A, typename B>
struct Method<R (C::*)(A, B)> {
  using Argument = A;
};
template <typename Pointer, typename To>
struct Rebind;
template <typename From, typename To>
struct Rebind<From*, To> {
  using Type = To*;
};
template <template <typename...> class Smart, typename From, typename... Rest, typename To>
struct Rebind<Smart<From, Rest...>, To> {
  using Type = Smart<To>;
};
}  // namespace compat_internal

using StepId = compat_internal::Method<decltype(&::tensorflow::RendezvousMgrInterface::Find)>::Argument;
// An owned reference: a raw pointer in 2.12, RefCountPtr from 2.13 on.
using FoundRendezvous = compat_internal::Method<decltype(&::tensorflow::RendezvousMgrInterface::Find)>::Result;
// The return type of BaseRendezvousMgr::Create.
using CreatedRendezvous = compat_internal::Rebind<FoundRendezvous, ::tensorflow::BaseRemoteRendezvous>::Type;

// Takes over the reference that Find() returned; the caller calls Unref().
inline ::tensorflow::RemoteRendezvous* TakeReference(::tensorflow::RemoteRendezvous* found) { return found; }
template <typename Smart>
auto TakeReference(Smart found) -> decltype(found.release()) {
  return found.release();
}

// ---- Kernels ----

namespace compat_internal {
// Executor::Args and OpKernelContext::Params carry the session's configuration from 2.17 on.
template <typename Args, typename Params>
auto SetSessionConfig(const Args& args, Params* params, int)
    -> decltype(void(params->session_config = args.session_config)) {
  params->session_config = args.session_config;
}
template <typename Args, typename Params>
void SetSessionConfig(const Args&, Params*, long) {}
template <typename Context, typename Args>
auto PassSessionConfig(const Context& context, Args* args, int)
    -> decltype(void(args->session_config = context.session_config())) {
  args->session_config = context.session_config();
}
template <typename Context, typename Args>
void PassSessionConfig(const Context&, Args*, long) {}
}  // namespace compat_internal

// Newer versions can reuse a context for one kernel after another, as long as none of them fails.
namespace compat_internal {
template <typename Params, typename Context>
auto RenewContext(Params* params, int num_outputs, std::optional<Context>* context, int)
    -> decltype((*context)->ResetOutputs(num_outputs)) {
  if (context->has_value()) {
    (*context)->ResetOutputs(num_outputs);
  } else {
    context->emplace(params, num_outputs);
  }
}
template <typename Params, typename Context>
void RenewContext(Params* params, int num_outputs, std::optional<Context>* context, long) {
  context->emplace(params, num_outputs);
}
}  // namespace compat_internal

template <typename Params, typename Context>
void RenewContext(Params* params, int num_outputs, std::optional<Context>* context) {
  compat_internal::RenewContext(params, num_outputs, context, 0);
}

template <typename Args, typename Params>
void SetSessionConfig(const Args& args, Params* params) {
  compat_internal::SetSessionConfig(args, params, 0);
}

// Passes the session's configuration from a kernel's context to the runs that the kernel starts.
template <typename Context, typename Args>
void PassSessionConfig(const Context& context, Args* args) {
  compat_internal::PassSessionConfig(context, args, 0);
}

// ---- Server factories ----

// Up to 2.18, each of TensorFlow's two libraries has a copy of ServerFactory with its own registry, and TF_NewServer
// uses the one that our calls are not bound to: register in every distinct copy. From 2.19 on there is one.
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

// ---- GrpcServer ----

namespace compat_internal {
struct NoCoordinationPool {
  int coordination_compute_pool_ = 0;
};
// The name is ambiguous in a class that inherits it from two bases, even if one of them keeps it private.
struct OwnPoolOrNone : ::tensorflow::GrpcServer, NoCoordinationPool {};
template <typename T>
auto CoordinationPoolOwner(int) -> decltype(&T::coordination_compute_pool_, NoCoordinationPool());
template <typename T>
::tensorflow::GrpcServer CoordinationPoolOwner(...);
}  // namespace compat_internal

namespace compat_internal {
template <typename T>
auto Replica(const T& def, int) -> decltype(def.replica()) {
  return def.replica();
}
template <typename T>
int Replica(const T&, ...) {
  return 0;
}
}  // namespace compat_internal

// The replica of its job that a server belongs to. Early versions (2.12) have only one.
template <typename ServerDef>
int ReplicaOf(const ServerDef& def) {
  return compat_internal::Replica(def, 0);
}

// The id of an eager context: a 64-bit unsigned integer, whose name depends on the version.
using ContextId =
    compat_internal::Method<decltype(&::tensorflow::ServerInterface::AddMasterEagerContextToEagerService)>::Argument;

// ---- Eager clients ----

namespace compat_internal {
template <typename Client, typename Request, typename Response, typename Done>
auto CreateEagerContext(Client* client, const Request* request, Response* response, Done done, int64_t timeout_ms,
                        int retries, int)
    -> decltype(client->CreateContextAsync(request, response, std::move(done), timeout_ms, retries)) {
  client->CreateContextAsync(request, response, std::move(done), timeout_ms, retries);
}
template <typename Client, typename Request, typename Response, typename Done>
void CreateEagerContext(Client* client, const Request* request, Response* response, Done done, int64_t, int, long) {
  client->CreateContextAsync(request, response, std::move(done));
}
}  // namespace compat_internal

// The call with a timeout and a number of retries, which early versions (2.12) do not have and never make.
template <typename Client, typename Request, typename Response, typename Done>
void CreateEagerContext(Client* client, const Request* request, Response* response, Done done, int64_t timeout_ms,
                        int retries) {
  compat_internal::CreateEagerContext(client, request, response, std::move(done), timeout_ms, retries, 0);
}

// The class with coordination_compute_pool_: GrpcServer in newer versions (2.21 has it, 2.18 does not), else a
// stand-in.
using CoordinationPoolOwner = decltype(compat_internal::CoordinationPoolOwner<compat_internal::OwnPoolOrNone>(0));

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_COMPAT_H_
