#include "cc/rendezvous/rendezvous.h"

#include <memory>
#include <string>
#include <utility>

#include "cc/base/compat_session.h"
#include "cc/rendezvous/recv_call.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::Rendezvous;
using tensorflow::Tensor;

namespace {

// Exists while this thread cleans up the step.
class CleanUp {
 public:
  explicit CleanUp(StepId step_id) : step_id_(step_id), outer_(current) { current = this; }
  ~CleanUp() { current = outer_; }
  CleanUp(const CleanUp&) = delete;
  CleanUp& operator=(const CleanUp&) = delete;

  static bool IsOf(StepId step_id) { return current != nullptr && current->step_id_ == step_id; }

 private:
  static thread_local const CleanUp* current;  // the innermost of this thread
  const StepId step_id_;
  const CleanUp* const outer_;
};

thread_local const CleanUp* CleanUp::current = nullptr;

}  // namespace

RemoteRendezvous::RemoteRendezvous(const tensorflow::WorkerEnv* env, StepId step_id, std::shared_ptr<HandleBoard> board)
    : BaseRemoteRendezvous(env, step_id), board_(std::move(board)) {}

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
  // Two threads may create the same route at once: a duplicate is harmless.
  std::lock_guard<std::mutex> lock(routes_mu_);
  made->next = routes_.load(std::memory_order_relaxed);
  *out = made.get();
  routes_.store(made.release(), std::memory_order_release);
  return OkStatus();
}

void RemoteRendezvous::RecvAsync(const ParsedKey& key, const Rendezvous::Args& args, DoneCallback done) {
  tensorflow::WorkerSession* session = this->session();
  const Route* route = session == nullptr ? nullptr : FindRoute(key, WorkerCacheOf(*session));
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
  Abort(status);
}

void RemoteRendezvous::PayAbort() {
  if (!abort_owed_.exchange(false)) return;
  Abort(MakeStatus(kAborted, "Cleanup " + std::to_string(step_id_)));
}

void RemoteRendezvous::Abort(const Status& status) {
  BaseRemoteRendezvous::StartAbort(status);
  // From here on TensorFlow keeps this object.
  std::vector<StepState*> states;
  {
    std::lock_guard<std::mutex> lock(states_mu_);
    was_aborted_ = true;
    for (const auto& state : states_) states.push_back(state.get());
  }
  for (StepState* state : states) state->Aborted();
}

void RemoteRendezvous::RecvFromRemoteAsync(const Rendezvous::ParsedKey& key, const Rendezvous::Args& args,
                                           DoneCallback done) {
  RecvAsync(key, args, std::move(done));
}

void RemoteRendezvous::FuseRecvFromRemoteAsync(const std::vector<ParsedKey>& keys, const Rendezvous::Args& args,
                                               FusedDone done) {
  struct Gathered {
    Gathered(size_t count, const Rendezvous::Args& args, FusedDone done)
        : sent(count), values(count), dead(count), left(count + 1), args(args), done(std::move(done)) {}
    void Answered(const Status& one) {
      {
        std::lock_guard<std::mutex> lock(mu);
        if (status.ok()) status = one;
        if (--left > 0) return;
      }
      done(status, sent, args, values, std::vector<bool>(dead.begin(), dead.end()));
    }
    std::vector<Rendezvous::Args> sent;
    std::vector<tensorflow::Tensor> values;
    std::vector<char> dead;
    size_t left;    // guarded by mu; one for the loop below
    Status status;  // guarded by mu: the first error
    std::mutex mu;
    const Rendezvous::Args args;
    const FusedDone done;
  };
  const auto gathered = std::make_shared<Gathered>(keys.size(), args, std::move(done));
  for (size_t i = 0; i < keys.size(); ++i) {
    RecvFromRemoteAsync(keys[i], args,
                        [gathered, i](const Status& status, const Rendezvous::Args& sent, const Rendezvous::Args&,
                                      const tensorflow::Tensor& value, bool is_dead) {
                          gathered->sent[i] = sent;
                          gathered->values[i] = value;
                          gathered->dead[i] = is_dead;
                          gathered->Answered(status);
                        });
  }
  gathered->Answered(OkStatus());
}

void RemoteRendezvous::FlowControlRecvFromRemoteAsync(const absl::string_view&, const ParsedKey& key,
                                                      const Rendezvous::Args& args, DoneCallback done) {
  const std::string text =
      "starwire does not carry receives with flow control between tasks: " + std::string(key.edge_name) + " from " +
      std::string(key.src_device) + " to " + std::string(key.dst_device) +
      " (put both ends into one task, or use protocol=\"grpc\")";
  done(MakeStatus(kUnimplemented, text), Rendezvous::Args(), args, tensorflow::Tensor(), false);
}

void RemoteRendezvous::Fetch(const Route* route, const ParsedKey& key, const Rendezvous::Args& args,
                             DoneCallback done) {
  Opens(&waiting_);
  RecvCall* call = RecvCall::New(this, route, step_id_, key, args, std::move(done));
  // From here on the step's abort and the caller's cancellation reach the call, until DeregisterCall() returns.
  RegisterCall(call, args);
  if (!call->status().ok()) {
    Deregister(call, args, 0);
    waiting_.fetch_sub(1);
    call->CompleteUnstarted();
    return;
  }
  call->Start(key, [this, call] {
    Deregister(call, call->args(), 0);
    waiting_.fetch_sub(1);
    call->Complete();
  });
}

RendezvousMgr::RendezvousMgr(const tensorflow::WorkerEnv* env, std::shared_ptr<HandleBoard> board)
    : BaseRendezvousMgr(env), board_(std::move(board)) {}

void RendezvousMgr::RecvLocalAsync(StepId step_id, const Rendezvous::ParsedKey& key, Rendezvous::DoneCallback done) {
  tensorflow::RemoteRendezvous* rendezvous = TakeReference(Find(step_id));
  static_cast<RemoteRendezvous*>(rendezvous)->ServeAsync(key, std::move(done));
  rendezvous->Unref();
}

void RendezvousMgr::Cleanup(StepId step_id) {
  const CleanUp here(step_id);
  BaseRendezvousMgr::Cleanup(step_id);
}

CreatedRendezvous RendezvousMgr::Create(StepId step_id, const tensorflow::WorkerEnv* env) {
  return CreatedRendezvous(new RemoteRendezvous(env, step_id, board_));
}

}  // namespace starwire
