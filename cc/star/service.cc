#include "cc/star/service.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "cc/base/guard.h"
#include "cc/base/methods.h"
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

// What those who waited for a compilation are told.
struct Outcome {
  StarService* service;
  Status status;
};

void Retain(void* object) { StarObjectOf(object)->Ref(); }
void Release(void* object) { StarObjectOf(object)->Unref(); }

}  // namespace

// A plan on its way into the table.
struct StarService::Registration {
  Registration(BodyHandle owned, const sw_call_request& request)
      : ticket(request.ticket), parts(request.parts), n_parts(request.n_parts), body(std::move(owned)) {}

  sw_bytes plan() const { return {static_cast<const uint8_t*>(parts[0].data), parts[0].len}; }

  const sw_ticket ticket;
  const sw_part* const parts;
  const size_t n_parts;
  const BodyHandle body;
  StarRegister head;  // its handle lies in the body
  // While it waits for somebody else's compilation.
  std::shared_ptr<Registration> self;
};

StarService::StarService(tensorflow::WorkerEnv* env) : env_(env) {}

StarService::~StarService() = default;

Status StarService::Start(std::shared_ptr<sw_engine> engine, const std::string& task,
                          std::shared_ptr<ServerErrands> errands) {
  engine_ = std::move(engine);
  task_ = task;
  errands_ = std::move(errands);
  for (tensorflow::Device* device : env_->device_mgr->ListDevices()) {
    incarnations_.push_back(device->attributes().incarnation());
  }
  sw_star_objects objects = {};
  objects.struct_size = sizeof(objects);
  objects.retain = Guarded<&Retain>;
  objects.release = Guarded<&Release>;
  ErrorHandle error;
  const sw_code code = sw_star_tables_new(engine_.get(), &objects, Into(&tables_), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  inline_ns_ = sw_star_tables_inline_ns(tables_.get());
  return OkStatus();
}

void StarService::OnPeerCame(uint64_t conn, sw_bytes task, uint64_t incarnation) {
  sw_star_tables_peer_came(tables_.get(), conn, task, incarnation);
  std::lock_guard<std::mutex> lock(peers_mu_);
  peers_[conn] = AsString(task);
}

void StarService::OnPeerGone(uint64_t conn) {
  sw_star_tables_peer_gone(tables_.get(), conn);
  std::lock_guard<std::mutex> lock(peers_mu_);
  peers_.erase(conn);
}

Status StarService::Named(const Status& status, uint64_t conn) {
  std::lock_guard<std::mutex> lock(peers_mu_);
  const auto found = peers_.find(conn);
  if (status.ok() || found == peers_.end()) return status;
  return MakeStatus(StatusNumber(status), StatusMessage(status) + " (from " + found->second + ")");
}

void StarService::SessionClosed(const std::string& handle) {
  if (tables_ != nullptr) sw_star_tables_session_closed(tables_.get(), AsBytes(handle));
}

void StarService::AllCleanedUp() {
  if (tables_ != nullptr) sw_star_tables_forget_plans(tables_.get());
}

template <typename Work>
void StarService::Schedule(Work work) {
  env_->compute_pool->Schedule([self = shared_from_this(), work = std::move(work)] { work(); });
}

void StarService::OnCall(const sw_call_request* request) {
  switch (static_cast<Method>(request->method)) {
    case Method::kStarRegister:
      return OnRegister(request);
    case Method::kStarEnd:
      return OnEnd(request);
    default:
      return OnStarCall(request);
  }
}

Status StarService::CheckIncarnation(uint64_t expected) const {
  if (expected == 0 || std::find(incarnations_.begin(), incarnations_.end(), expected) != incarnations_.end()) {
    return OkStatus();
  }
  return MakeStatus(kAborted, "starwire: " + task_ + " was restarted: create the session again to use it");
}

Status StarService::FindSession(const std::string& handle, std::shared_ptr<tensorflow::WorkerSession>* session,
                                bool* isolated) {
  Status status = env_->session_mgr->WorkerSessionForSession(handle, session);
  if (!status.ok()) return status;
  *isolated = (*session)->device_mgr() != env_->device_mgr;
  return OkStatus();
}

// ---- calls ----

void StarService::OnStarCall(const sw_call_request* request) {
  auto run = std::make_shared<StarRun>(shared_from_this(), BodyHandle(request->body), *request);
  const Status status = Guard(
      "a star call", [&] { return run->Read(*request); }, [](const Status& thrown) { return thrown; });
  if (!status.ok()) {
    run->Fail(Named(status, request->ticket.conn));
  } else if (run->is_laborious()) {
    Remember(run);
    Schedule([this, run] { Serve(run, /*on_reactor=*/false); });
  } else {
    Serve(run, /*on_reactor=*/true);
  }
}

void StarService::Serve(const std::shared_ptr<StarRun>& run, bool on_reactor) {
  Guard(
      "a star call", [&] { TakeAndLaunch(run, on_reactor); }, [&run](const Status& thrown) { run->Fail(thrown); });
}

void StarService::TakeAndLaunch(const std::shared_ptr<StarRun>& run, bool on_reactor) {
  Status status = Named(run->TakeValues(), run->ticket.conn);
  if (status.ok()) status = CheckIncarnation(run->incarnation());
  if (status.ok()) status = run->Begin();
  if (!status.ok()) {
    run->Fail(status);
    return;
  }
  if (void* found = sw_star_tables_plan_find(tables_.get(), AsBytes(run->session()), run->plan_hash().data())) {
    Launch(run, static_cast<StarPlan*>(StarObjectOf(found)), on_reactor);
  } else if (on_reactor) {
    Remember(run);
    Schedule([this, run] { FindPlan(run); });
  } else {
    FindPlan(run);
  }
}

void StarService::FindPlan(const std::shared_ptr<StarRun>& run) {
  std::shared_ptr<tensorflow::WorkerSession> session;
  bool isolated = false;
  const Status status = FindSession(run->session(), &session, &isolated);
  if (!status.ok()) {
    run->Fail(status);
    return;
  }
  void* found =
      sw_star_tables_plan_adopt(tables_.get(), AsBytes(run->session()), run->plan_hash().data(), isolated ? 1 : 0);
  if (found == nullptr) {
    run->AskForPlan();
    return;
  }
  Launch(run, static_cast<StarPlan*>(StarObjectOf(found)), /*on_reactor=*/false);
}

void StarService::Launch(const std::shared_ptr<StarRun>& run, StarPlan* plan, bool on_reactor) {
  const Status status = run->Prepare(plan);
  if (!status.ok()) {
    run->Fail(status);
    return;
  }
  if (on_reactor && !run->wants_trace() && plan->RunsInline(inline_ns_)) {
    run->Go(/*alone=*/true);
    return;
  }
  if (on_reactor) {
    Remember(run);
    Schedule([run] { run->Go(/*alone=*/false); });
  } else {
    run->Go(/*alone=*/false);
  }
}

void StarService::Remember(const std::shared_ptr<StarRun>& run) {
  run->MakeCancellable();
  Shard& shard = ShardOf(run->ticket);
  std::lock_guard<std::mutex> lock(shard.mu);
  shard.runs[run->ticket] = run;
}

void StarService::Forget(sw_ticket ticket) {
  std::shared_ptr<StarRun> run;  // goes when the lock is gone
  Shard& shard = ShardOf(ticket);
  std::lock_guard<std::mutex> lock(shard.mu);
  auto found = shard.runs.find(ticket);
  if (found == shard.runs.end()) return;
  run = std::move(found->second);
  shard.runs.erase(found);
}

void StarService::OnCancel(sw_ticket ticket) {
  std::shared_ptr<StarRun> run;
  {
    Shard& shard = ShardOf(ticket);
    std::lock_guard<std::mutex> lock(shard.mu);
    auto found = shard.runs.find(ticket);
    if (found == shard.runs.end()) return;
    run = found->second;
  }
  run->Cancel();
}

void StarService::OnEnd(const sw_call_request* request) {
  const BodyHandle body(request->body);
  StarEnd end;
  const Status status = DecodeStarEnd(request->meta, &end);
  if (status.ok()) sw_star_tables_step_end(tables_.get(), request->ticket.conn, end.step_id);
  ReplyError(engine_.get(), request->ticket, status);
}

// ---- registrations ----

void StarService::OnRegister(const sw_call_request* request) {
  auto registration = std::make_shared<Registration>(BodyHandle(request->body), *request);
  Status status = DecodeStarRegister(request->meta, &registration->head);
  if (status.ok()) status = CheckIncarnation(registration->head.incarnation);
  if (status.ok() && request->n_parts != 1) {
    status = MakeStatus(kInvalidArgument,
                        "starwire: a plan arrived in " + std::to_string(request->n_parts) + " parts instead of one");
  }
  if (!status.ok()) {
    ReplyError(engine_.get(), request->ticket, status);
    return;
  }
  running_.fetch_add(1, std::memory_order_relaxed);
  // Hashing, parsing and making kernels takes its time.
  Schedule([this, registration] { Register(registration); });
}

void StarService::Register(const std::shared_ptr<Registration>& registration) {
  const StarRegister& head = registration->head;
  std::shared_ptr<tensorflow::WorkerSession> session;
  bool isolated = false;
  Status status = FindSession(AsString(head.session), &session, &isolated);
  if (status.ok() && PlanHashOf(registration->plan()) != head.plan) {
    status = MakeStatus(kInvalidArgument,
                        "starwire: plan hash mismatch: the registered bytes do not match the hash in the request");
  }
  if (status.ok()) {
    registration->self = registration;
    const uint32_t claim =
        sw_star_tables_plan_claim(tables_.get(), head.session, head.plan.data(), isolated ? 1 : 0, registration.get());
    if (claim == SW_CLAIM_WAITS) return;
    registration->self.reset();
    if (claim == SW_CLAIM_COMPILE) status = CompilePlan(*registration, std::move(session), isolated);
  }
  ReplyError(engine_.get(), registration->ticket, status);
  running_.fetch_sub(1, std::memory_order_release);
}

Status StarService::CompilePlan(const Registration& registration, std::shared_ptr<tensorflow::WorkerSession> session,
                                bool isolated) {
  const StarRegister& head = registration.head;
  const sw_bytes bytes = registration.plan();
  Status status;
  StarPlan* plan = nullptr;
  sw_star_made made = {};
  made.struct_size = sizeof(made);
  {
    tensorflow::GraphDef graph;
    if (bytes.len > static_cast<size_t>(std::numeric_limits<int>::max()) ||
        !graph.ParseFromArray(bytes.data, static_cast<int>(bytes.len))) {
      status = MakeStatus(kInvalidArgument, "starwire: a registered plan is not a GraphDef");
    } else if (status = Named(CheckConstants(graph), registration.ticket.conn); status.ok()) {
      const bool has_state = HasKernelState(graph);
      made.has_state = has_state ? 1 : 0;
      // What everybody shares must not keep one worker's session alive.
      if (!isolated && !has_state) session = env_->session_mgr->LegacySession();
      status = StarPlan::Compile(std::move(session), AsString(head.session), graph, has_state,
                                 env_->compute_pool->NumThreads(), plans_alive_, errands_, &plan);
    }
  }
  made.conn = registration.ticket.conn;
  made.bytes = bytes.len;
  made.isolated = isolated ? 1 : 0;
  made.plan = plan == nullptr ? nullptr : InTable(plan);
  Outcome outcome = {this, status};
  ErrorHandle error;
  const sw_code code =
      sw_star_tables_plan_compiled(tables_.get(), head.session, head.plan.data(), status.ok() ? &made : nullptr,
                                   Guarded<&StarService::Waited>, &outcome, Into(&error));
  return code == 0 ? status : StatusFromError(code, error);
}

void StarService::Waited(void* ctx, void* waiter) {
  const auto* outcome = static_cast<Outcome*>(ctx);
  StarService* service = outcome->service;
  const std::shared_ptr<Registration> registration = std::move(static_cast<Registration*>(waiter)->self);
  if (outcome->status.ok()) {
    service->Schedule([service, registration] { service->Register(registration); });
    return;
  }
  ReplyError(service->engine_.get(), registration->ticket, outcome->status);
  service->running_.fetch_sub(1, std::memory_order_release);
}

// ---- the end ----

bool StarService::Shutdown(int64_t timeout_ms) {
  for (Shard& shard : shards_) {
    std::vector<std::shared_ptr<StarRun>> runs;
    {
      std::lock_guard<std::mutex> lock(shard.mu);
      for (auto& entry : shard.runs) runs.push_back(entry.second);
    }
    for (const auto& run : runs) run->Cancel();
  }
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
  if (tables_ != nullptr) sw_star_tables_forget_plans(tables_.get());
  return wait_for(*plans_alive_);
}

}  // namespace starwire
