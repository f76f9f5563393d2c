#include "cc/rendezvous/remote_rendezvous.h"

#include <memory>
#include <string>
#include <utility>

#include "cc/rendezvous/recv_call.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::Rendezvous;
using tensorflow::Tensor;

namespace {

// Of this thread.
thread_local const RemoteRendezvous::CleanUp* clean_up = nullptr;

}  // namespace

RemoteRendezvous::CleanUp::CleanUp(StepId step_id) : step_id_(step_id), outer_(clean_up) { clean_up = this; }

RemoteRendezvous::CleanUp::~CleanUp() { clean_up = outer_; }

bool RemoteRendezvous::CleanUp::IsOf(StepId step_id) { return clean_up != nullptr && clean_up->step_id_ == step_id; }

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
      Opens(&waiting_);
      BaseRemoteRendezvous::RecvAsync(key, args, Answering(std::move(done)));
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

Status RemoteRendezvous::Send(const ParsedKey& key, const Rendezvous::Args& args, const Tensor& value, bool is_dead) {
  Opens(&unclaimed_);
  Status status = BaseRemoteRendezvous::Send(key, args, value, is_dead);
  if (!status.ok()) unclaimed_.fetch_sub(1);
  return status;
}

void RemoteRendezvous::StartAbort(const Status& status) {
  if (CleanUp::IsOf(step_id_)) {
    abort_owed_.store(true);
    if (waiting_.load() == 0 && unclaimed_.load() == 0) return;
    PayAbort();
    return;
  }
  BaseRemoteRendezvous::StartAbort(status);
}

void RemoteRendezvous::PayAbort() {
  if (!abort_owed_.exchange(false)) return;
  BaseRemoteRendezvous::StartAbort(MakeStatus(kAborted, "Cleanup " + std::to_string(step_id_)));
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
  Opens(&waiting_);
  RecvCall* call = RecvCall::New(this, route, step_id_, key, args, std::move(done));
  // From here on the step's abort and the caller's cancellation reach the call, until DeregisterCall() returns.
  RegisterCall(call, args);
  if (!call->status().ok()) {
    DeregisterCall(call, args);
    waiting_.fetch_sub(1);
    call->CompleteUnstarted();
    return;
  }
  call->Start(key, [this, call] {
    DeregisterCall(call, call->args());
    waiting_.fetch_sub(1);
    call->Complete();
  });
}

}  // namespace starwire
