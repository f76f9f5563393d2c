#include "cc/rendezvous/remote_rendezvous.h"

#include <memory>
#include <utility>

#include "cc/rendezvous/recv_call.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::Rendezvous;
using tensorflow::Tensor;

RemoteRendezvous::RemoteRendezvous(const tensorflow::WorkerEnv* env, StepId step_id)
    : BaseRemoteRendezvous(env, step_id) {}

RemoteRendezvous::~RemoteRendezvous() {
  Route* route = routes_.load(std::memory_order_acquire);
  while (route != nullptr) {
    Route* next = route->next;
    delete route;
    route = next;
  }
}

const Route* RemoteRendezvous::FindRoute(const ParsedKey& key, const tensorflow::WorkerCacheInterface* cache) const {
  for (const Route* route = routes_.load(std::memory_order_acquire); route != nullptr; route = route->next) {
    if (route->Leads(key) && route->BelongsTo(cache)) return route;
  }
  return nullptr;
}

Status RemoteRendezvous::MakeRoute(tensorflow::WorkerSession* session, const ParsedKey& key, const Route** out) {
  std::unique_ptr<Route> made;
  Status status = Route::Make(session, key, &made);
  if (!status.ok()) return status;
  // Two threads may make the same route at once: one too many does no harm.
  std::lock_guard<std::mutex> lock(routes_mu_);
  made->next = routes_.load(std::memory_order_relaxed);
  *out = made.get();
  routes_.store(made.release(), std::memory_order_release);
  return OkStatus();
}

void RemoteRendezvous::RecvAsync(const ParsedKey& key, const Rendezvous::Args& args, DoneCallback done) {
  tensorflow::WorkerSession* session = this->session();
  const Route* route = session == nullptr ? nullptr : FindRoute(key, session->worker_cache());
  if (route == nullptr) {
    const bool local = !tensorflow::DeviceNameUtils::HasSomeDetails(key.src) ||
                       tensorflow::DeviceNameUtils::IsSameAddressSpace(key.src, key.dst);
    if (local) {
      BaseRemoteRendezvous::RecvAsync(key, args, std::move(done));
      return;
    }
    Status status = MakeRoute(session, key, &route);
    if (!status.ok()) {
      done(status, Rendezvous::Args(), args, Tensor(), false);
      return;
    }
  }
  Fetch(route, key, args, std::move(done));
}

StarStep* RemoteRendezvous::star_step() {
  std::lock_guard<std::mutex> lock(star_mu_);
  if (star_step_ == nullptr) star_step_ = std::make_unique<StarStep>(step_id_);
  return star_step_.get();
}

void RemoteRendezvous::RecvFromRemoteAsync(const Rendezvous::ParsedKey& key, const Rendezvous::Args& args,
                                           DoneCallback done) {
  RecvAsync(key, args, std::move(done));
}

void RemoteRendezvous::Fetch(const Route* route, const ParsedKey& key, const Rendezvous::Args& args,
                             DoneCallback done) {
  RecvCall* call = RecvCall::New(this, route, step_id_, key, args, std::move(done));
  // From here on the step's abort and the caller's cancellation reach the call, until DeregisterCall() returns.
  RegisterCall(call, args);
  if (!call->status().ok()) {
    DeregisterCall(call, args);
    call->CompleteUnstarted();
    return;
  }
  call->Start(key, [this, call] {
    DeregisterCall(call, call->args());
    call->Complete();
  });
}

}  // namespace starwire
