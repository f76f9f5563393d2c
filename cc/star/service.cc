#include "cc/star/service.h"

#include <chrono>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/star/kernel_state.h"
#include "cc/star/run.h"
#include "cc/tensor/objects.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/session_mgr.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {

namespace {

StarService* Of(void* ctx) { return static_cast<StarService*>(ctx); }

sw_code Refuse(const Status& status, bool names_peer, sw_star_failure* failure) {
  const std::string message = StatusMessage(status), details = EncodeErrorDetails(status);
  sw_star_failure_set(failure, StatusNumber(status), AsBytes(message), AsBytes(details), names_peer ? 1 : 0);
  return StatusNumber(status);
}

sw_code SessionThrew(const Status& thrown, void*, sw_bytes, uint32_t*, sw_star_failure* failure) {
  return Refuse(thrown, false, failure);
}

sw_code CompileThrew(const Status& thrown, void*, sw_bytes, sw_bytes, sw_star_compiled*, sw_star_failure* failure) {
  return Refuse(thrown, false, failure);
}

sw_code RestoreThrew(const Status& thrown, void*, const sw_state*, sw_star_failure* failure) {
  return Refuse(thrown, false, failure);
}

}  // namespace

StarService::StarService(tensorflow::WorkerEnv* env) : env_(env), state_(env) {
  for (tensorflow::Device* device : env_->device_mgr->ListDevices()) {
    incarnations_.push_back(device->attributes().incarnation());
  }
}

StarService::~StarService() = default;

sw_star_handlers StarService::Handlers() const {
  sw_star_handlers handlers = {};
  handlers.struct_size = sizeof(handlers);
  handlers.retain = Guarded<&StarService::Retain>;
  handlers.release = Guarded<&StarService::Release>;
  handlers.spawn = Guarded<&StarService::Spawn, &StarService::SpawnThrew>;
  handlers.session = Guarded<&StarService::Session, &SessionThrew>;
  handlers.compile = Guarded<&StarService::Compile, &CompileThrew>;
  handlers.run = Guarded<&StarService::Run, &StarService::RunThrew>;
  handlers.cancel = Guarded<&StarService::Cancel>;
  handlers.restore = Guarded<&StarService::Restore, &RestoreThrew>;
  handlers.changes = Guarded<&StarService::Changes, &StarService::ChangesThrew>;
  handlers.changes_were_lost = Guarded<&StarService::ChangesWereLost>;
  handlers.incarnations = incarnations_.data();
  handlers.n_incarnations = incarnations_.size();
  return handlers;
}

void StarService::Start(std::shared_ptr<sw_engine> engine, const std::string& task,
                        std::shared_ptr<ServerQueues> queues) {
  engine_ = std::move(engine);
  task_ = task;
  queues_ = std::move(queues);
  started_.store(true, std::memory_order_release);
}

void StarService::SessionClosed(const std::string& handle) {
  if (started_.load(std::memory_order_acquire)) sw_engine_star_session_closed(engine_.get(), AsBytes(handle));
}

void StarService::CleansUp(const std::vector<std::string>& containers) {
  ForgetPlans();
  if (state_.is_on()) state_.CleanedUp(containers);
}

void StarService::ForgetPlans() {
  if (started_.load(std::memory_order_acquire)) sw_engine_star_forget_plans(engine_.get());
}

bool StarService::KeepsState() const { return state_.is_on(); }

std::function<void()> StarService::ChangesOf(const std::string& handle, const tensorflow::GraphDef& graph) {
  if (!state_.is_on()) return nullptr;
  std::shared_ptr<tensorflow::WorkerSession> session;
  bool isolated = false;
  if (FindSession(handle, &session, &isolated).ok() && !SharesVariables(session.get())) return nullptr;
  std::vector<StateUpdate> updates = state_.UpdatesOf(graph);
  if (updates.empty()) return nullptr;
  // Which feeds a run has is not seen.
  for (StateUpdate& update : updates) update.feed = -1;
  return [this, updates = std::move(updates)] { state_.Changed(updates, {}); };
}

void StarService::AllChanged() {
  if (state_.is_on()) state_.AllChanged();
}

namespace {

using Then = std::function<void(const Status& status)>;

void IsWritten(void* ctx, uint32_t is_written) {
  const std::unique_ptr<Then> then(static_cast<Then*>(ctx));
  (*then)(is_written != 0 ? OkStatus()
                          : MakeStatus(kUnavailable, "starwire: the server stopped before it had written the changes"));
}

}  // namespace

void StarService::WhenWritten(Then then) {
  if (!started_.load(std::memory_order_acquire)) return then(OkStatus());
  sw_engine_when_written(engine_.get(), Guarded<&IsWritten>, new Then(std::move(then)));
}

sw_code StarService::Restore(void* ctx, const sw_state* state, sw_star_failure* failure) {
  const Status status = Of(ctx)->state_.Restore(state);
  return status.ok() ? 0 : Refuse(status, false, failure);
}

void StarService::Changes(void* ctx, sw_changes* changes, uint32_t early) {
  Of(ctx)->state_.Write(changes, early != 0);
}

// What was not written, is next time.
void StarService::ChangesThrew(const Status& status, void* ctx, sw_changes*, uint32_t) {
  LOG(ERROR) << "starwire: changes of the state were not written: " << StatusMessage(status);
  Of(ctx)->state_.AllChanged();
}

void StarService::ChangesWereLost(void* ctx) { Of(ctx)->state_.AllChanged(); }

void StarService::Retain(void* object) { StarObjectOf(object)->Ref(); }

void StarService::Release(void* object) { StarObjectOf(object)->Unref(); }

void StarService::Schedule(std::function<void()> work) {
  env_->compute_pool->Schedule([self = shared_from_this(), work = std::move(work)] { work(); });
}

void StarService::Spawn(void* ctx, sw_star_job* job) {
  StarService* service = Of(ctx);
  service->running_.fetch_add(1, std::memory_order_relaxed);
  service->Schedule([service, job] {
    sw_star_job_run(job);
    service->running_.fetch_sub(1, std::memory_order_release);
  });
}

// The job must run, even here.
void StarService::SpawnThrew(const Status&, void* ctx, sw_star_job* job) {
  sw_star_job_run(job);
  Of(ctx)->running_.fetch_sub(1, std::memory_order_release);
}

Status StarService::FindSession(const std::string& handle, std::shared_ptr<tensorflow::WorkerSession>* session,
                                bool* isolated) {
  Status status = env_->session_mgr->WorkerSessionForSession(handle, session);
  if (!status.ok()) return status;
  *isolated = (*session)->device_mgr() != env_->device_mgr;
  return OkStatus();
}

// Sessions with resource managers of their own take their variables with them.
bool StarService::SharesVariables(tensorflow::WorkerSession* session) const {
  const auto managers = [](const tensorflow::DeviceMgr* devices) {
    std::set<tensorflow::ResourceMgr*> found;
    for (tensorflow::Device* device : devices->ListDevices()) found.insert(device->resource_manager());
    return found;
  };
  const tensorflow::DeviceMgr* own = session->device_mgr();
  return own == env_->device_mgr || managers(own) == managers(env_->device_mgr);
}

sw_code StarService::Session(void* ctx, sw_bytes handle, uint32_t* is_isolated, sw_star_failure* failure) {
  std::shared_ptr<tensorflow::WorkerSession> session;
  bool isolated = false;
  const Status status = Of(ctx)->FindSession(AsString(handle), &session, &isolated);
  if (!status.ok()) return Refuse(status, false, failure);
  *is_isolated = isolated ? 1 : 0;
  return 0;
}

sw_code StarService::Compile(void* ctx, sw_bytes session, sw_bytes plan, sw_star_compiled* compiled,
                             sw_star_failure* failure) {
  bool names_peer = false;
  const Status status = Of(ctx)->CompilePlan(AsString(session), plan, compiled, &names_peer);
  return status.ok() ? 0 : Refuse(status, names_peer, failure);
}

Status StarService::CompilePlan(const std::string& handle, sw_bytes bytes, sw_star_compiled* compiled,
                                bool* names_peer) {
  std::shared_ptr<tensorflow::WorkerSession> session;
  bool isolated = false;
  Status status = FindSession(handle, &session, &isolated);
  if (!status.ok()) return status;
  tensorflow::GraphDef graph;
  if (bytes.len > static_cast<size_t>(std::numeric_limits<int>::max()) ||
      !graph.ParseFromArray(bytes.data, static_cast<int>(bytes.len))) {
    return MakeStatus(kInvalidArgument, "starwire: a registered plan is not a GraphDef");
  }
  status = CheckConstants(graph);
  *names_peer = !status.ok();
  if (!status.ok()) return status;
  const bool has_state = HasKernelState(graph);
  const bool shares_variables = SharesVariables(session.get());
  // A shared plan must not keep the session alive that registered it.
  if (!isolated && !has_state) session = env_->session_mgr->LegacySession();
  StarPlan* plan = nullptr;
  status = StarPlan::Compile(std::move(session), handle, graph, has_state, env_->compute_pool->NumThreads(),
                             plans_alive_, queues_, &plan);
  if (!status.ok()) return status;
  if (shares_variables && state_.is_on()) plan->SetUpdates(state_.UpdatesOf(graph));
  compiled->plan = InTable(plan);
  compiled->has_state = has_state ? 1 : 0;
  compiled->may_wait = plan->may_wait() ? 1 : 0;
  compiled->ends_alone = plan->ends_alone() ? 1 : 0;
  compiled->has_effects = plan->has_effects() ? 1 : 0;
  return OkStatus();
}

void* StarService::Run(void* ctx, const sw_star_request* request) {
  BodyHandle body(request->body);
  StarService* service = Of(ctx);
  // Start() follows within microseconds.
  while (!service->started_.load(std::memory_order_acquire)) std::this_thread::yield();
  auto* run = new StarRun(service->shared_from_this(), *request);
  return InTable(run->Begin(*request, std::move(body)));
}

// There is no run yet.
void* StarService::RunThrew(const Status& thrown, void* ctx, const sw_star_request* request) {
  const std::string message = StatusMessage(thrown);
  sw_star_outcome outcome = {};
  outcome.struct_size = sizeof(outcome);
  outcome.code = StatusNumber(thrown);
  outcome.message = AsBytes(message);
  sw_engine_star_done(Of(ctx)->engine_.get(), request->ticket, &outcome);
  return nullptr;
}

void StarService::Cancel(void*, void* run) { static_cast<StarRun*>(StarObjectOf(run))->Cancel(); }

bool StarService::Shutdown(int64_t timeout_ms) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const auto wait_for = [give_up](const std::atomic<int64_t>& count) {
    while (count.load(std::memory_order_acquire) > 0) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  };
  if (!wait_for(running_)) return false;
  // Kernels go before the devices do.
  ForgetPlans();
  return wait_for(*plans_alive_);
}

}  // namespace starwire
