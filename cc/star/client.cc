#include "cc/star/client.h"

#include <iterator>
#include <utility>

#include "cc/base/completion_batch.h"
#include "cc/base/guard.h"
#include "cc/base/methods.h"
#include "cc/base/recovery.h"
#include "cc/base/status_codec.h"
#include "cc/worker/session_recovery.h"

namespace starwire {
namespace {

// A server that evicts a plan between its registration and the call is short of memory, or worse.
constexpr int kMaxRegistrations = 8;
// A server that forgets a session so often is restarted again and again.
constexpr int kMaxSessions = 10;
// A connection that is lost so often is of no use.
constexpr uint32_t kMaxAttempts = 10;
// A server that does not answer by then is down, as far as the call is concerned.
constexpr uint32_t kReconnectMs = 10'000;
// Handing out more fetches takes too long for a reactor.
constexpr size_t kFewFetches = 64;

sw_bytes BytesOf(const std::vector<uint8_t>& bytes) { return {bytes.data(), bytes.size()}; }

// For replies that are ignored.
struct Nobody {
  static sw_code Alloc(void*, sw_bytes, size_t, const uint64_t*, void**) { return kCancelled; }
  static void Done(void* op, const sw_result*) { delete static_cast<std::shared_ptr<Channel>*>(op); }
};

}  // namespace

void StarStep::Keeps(const std::string& task, const std::shared_ptr<Channel>& channel, const std::string& session) {
  std::lock_guard<std::mutex> lock(mu_);
  Server& server = servers_[task];
  server.channel = channel;
  server.session = session;
  ++server.calls;
}

void StarStep::Freed(const std::string& task) {
  std::lock_guard<std::mutex> lock(mu_);
  servers_.erase(task);
}

void StarStep::Ended(const std::string& task) {
  Servers late;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = servers_.find(task);
    if (found == servers_.end()) return;
    --found->second.calls;
    if (!was_aborted_) return;
    late.insert(*found);
    if (found->second.calls <= 0) servers_.erase(found);
  }
  Free(late);
}

void StarStep::Aborted() {
  Servers servers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    was_aborted_ = true;
    servers = servers_;
    // What frees the slots may overtake a call on its way to the server: it is sent again when the call has ended.
    for (auto it = servers_.begin(); it != servers_.end();) {
      it = it->second.calls <= 0 ? servers_.erase(it) : std::next(it);
    }
  }
  Free(servers);
}

StarStep::~StarStep() { Free(servers_); }

void StarStep::Free(const Servers& servers) const {
  static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&Nobody::Alloc>, Guarded<&Nobody::Done>};
  for (const auto& entry : servers) {
    std::vector<uint8_t> meta;
    // A call with this session's handle was made before.
    if (!EncodeStarEnd(step_id_, AsBytes(entry.second.session), &meta).ok()) continue;
    sw_channel* channel = entry.second.channel->handle();
    sw_channel_call(channel, static_cast<uint32_t>(Method::kStarEnd), BytesOf(meta), nullptr, 0, 0, &kVtable,
                    new std::shared_ptr<Channel>(entry.second.channel));
  }
}

void StarClient::Start(const StarCallee* callee, Where where, std::vector<StarValue> feeds, Done done) {
  auto* client = new StarClient(callee, std::move(where), std::move(feeds), std::move(done));
  if (auto* cancellation = client->where_.cancellation) {
    client->token_ = cancellation->get_cancellation_token();
    if (!cancellation->RegisterCallback(client->token_, [client] { client->Cancel(); })) {
      const Done finished = std::move(client->done_);
      const Status cancelled = AfterCancellation(MakeStatus(kCancelled, "the step was already cancelled"));
      const Status status = Named(*callee, cancelled);
      client->Unref();
      finished(status, {}, std::string());
      return;
    }
  }
  client->Call();
}

StarClient::StarClient(const StarCallee* callee, Where where, std::vector<StarValue> feeds, Done done)
    : callee_(callee), where_(std::move(where)), feeds_(std::move(feeds)), done_(std::move(done)) {}

Status StarClient::Named(const StarCallee& callee, const Status& status) {
  Status named =
      MakeStatus(StatusNumber(status), StatusMessage(status) + " (" + callee.name + ", a call to " + callee.task + ")");
  DecodeErrorDetails(AsBytes(EncodeErrorDetails(status)), &named);
  return callee.of_function ? FromRemoteTarget(named, callee.task) : named;
}

void StarClient::Call() {
  static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&StarClient::OnAlloc>,
                                       Guarded<&StarClient::OnDone, &StarClient::DoneThrew>};
  const Status lacks = CheckNeeds(callee_->needs, callee_->task, where_.session);
  if (!lacks.ok()) {
    Finish(lacks);
    return;
  }
  if (callee_->can_repeat && number_ == 0) lane_ = sw_channel_lane_take(where_.channel->handle(), &number_);
  StarCall call;
  call.step_id = where_.step_id;
  call.incarnation = callee_->incarnation;
  call.plan = callee_->hash;
  call.session = AsBytes(where_.session);
  call.keeps = callee_->keeps;
  call.lane = lane_;
  call.number = number_;
  call.attempt = attempt_;
  if (callee_->last) call.flags |= StarCall::kLast;
  if (where_.trace) call.flags |= StarCall::kTrace;
  std::vector<uint8_t> meta;
  Status status = EncodeStarCall(call, &meta);
  ValueEncoder cargo;
  if (status.ok()) status = cargo.Pack(feeds_.data(), feeds_.size(), &meta);
  if (!status.ok()) {
    Finish(status);
    return;
  }
  if (!callee_->keeps.empty() && where_.step != nullptr && !keeps_) {
    where_.step->Keeps(callee_->task, where_.channel, where_.session);
    keeps_ = true;
  }
  cargo_ = std::make_unique<ValueDecoder>();
  taken_ = false;
  refused_ = OkStatus();
  Send(static_cast<uint32_t>(Method::kStarCall), meta, cargo.Take(), &kVtable);
}

void StarClient::Register() {
  static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&Nobody::Alloc>,
                                       Guarded<&StarClient::OnRegistered, &StarClient::DoneThrew>};
  std::vector<uint8_t> meta;
  const Status status = EncodeStarRegister(callee_->incarnation, callee_->hash, AsBytes(where_.session), &meta);
  if (!status.ok()) {
    Finish(status);
    return;
  }
  // The transport may still be sending the plan when the kernel is gone: an operation that ends early keeps its
  // payload.
  using Plan = std::shared_ptr<const std::string>;
  const sw_part part = {callee_->plan->data(), callee_->plan->size()};
  const sw_payload payload = {&part, 1, new Plan(callee_->plan), Guarded<&DeleteOwner<Plan>>};
  Send(static_cast<uint32_t>(Method::kStarRegister), meta, &payload, &kVtable);
}

void StarClient::Send(uint32_t method, const std::vector<uint8_t>& meta, const sw_payload* payload,
                      const sw_op_vtable* vtable) {
  const std::shared_ptr<Channel> channel = where_.channel;
  uint64_t request;
  {
    std::lock_guard<std::mutex> lock(mu_);
    request = ++request_;
    has_id_ = false;
  }
  Ref();
  const bool waits = callee_->can_recover() && number_ != 0;
  const uint32_t deadline_ms = waits ? RecoverMs() : attempt_ == 0 ? 0 : kReconnectMs;
  const uint32_t flags = SW_CALL_DEADLINE_TO_CONNECT | (waits ? SW_CALL_WAIT_FOR_READY : 0);
  const uint64_t id =
      sw_channel_call(channel->handle(), method, BytesOf(meta), payload, deadline_ms, flags, vtable, this);
  bool cancel;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (request_ == request) {
      id_ = id;
      has_id_ = true;
    }
    cancel = has_id_ && cancelled_;
  }
  if (cancel) Cancel();
  Unref();
}

void StarClient::Cancel() {
  static const std::string kMessage = "the step was cancelled";
  uint64_t id, ticket;
  {
    std::lock_guard<std::mutex> lock(mu_);
    cancelled_ = true;
    ticket = ticket_;
    if (ticket == 0 && !has_id_) return;
    id = id_;
  }
  if (ticket != 0) {
    StopWaiting(ticket);
    return;
  }
  // The cancelling thread may hold a lock that the completion takes.
  CompletionBatch::DeferScope defer;
  sw_channel_cancel(where_.channel->handle(), id, kCancelled, AsBytes(kMessage));
}

Status StarClient::Take(sw_bytes meta, size_t n, const uint64_t* lens, void** bufs) {
  Status status = DecodeStarReply(meta, &reply_);
  if (!status.ok() || (reply_.flags & kRegister) != 0) return status;
  const sw_bytes table = {meta.data + reply_.table, meta.len - reply_.table};
  return cargo_->Prepare(table, n, lens, reply_.stats_bytes, where_.allocator, bufs);
}

Status StarClient::Outcome(const sw_result& result) const {
  // That there is no new connection says less than how the last one was lost.
  const bool unreached = result.from_peer == 0 && (result.code == kUnavailable || result.code == kDeadlineExceeded);
  if (unreached && !lost_.ok()) return lost_;
  const Status status = StatusFromResult(result, callee_->task);
  // Sessions recover from it, but not from a deadline.
  return unreached ? MakeStatus(kUnavailable, StatusMessage(status)) : status;
}

sw_code StarClient::OnAlloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs) {
  auto* client = static_cast<StarClient*>(op);
  client->taken_ = true;
  client->refused_ = client->Take(meta, n, lens, bufs);
  if (client->refused_.ok()) return 0;
  return StatusNumber(client->refused_);
}

void StarClient::OnDone(void* op, const sw_result* result) {
  auto* client = static_cast<StarClient*>(op);
  Status status = client->Outcome(*result);
  if (result->lost != 0) {
    CompletionBatch::Add([client, status] { client->Repeat(status); });
    return;
  }
  // If OnAlloc refused the reply, its own status says more.
  if (!client->refused_.ok()) status = client->refused_;
  if (status.ok() && !client->taken_) status = client->Take(result->meta, 0, nullptr, nullptr);
  const bool unknown = status.ok() && (client->reply_.flags & kRegister) != 0;
  // An error ends the step, which may take long.
  const bool brief = status.ok() && client->cargo_->size() <= kFewFetches && !unknown;
  CompletionBatch::Add([client, status, unknown] { client->Arrived(status, unknown); },
                       brief ? CompletionBatch::Kind::kBrief : CompletionBatch::Kind::kAny);
}

void StarClient::OnRegistered(void* op, const sw_result* result) {
  auto* client = static_cast<StarClient*>(op);
  const Status status = client->Outcome(*result);
  const bool lost = result->lost != 0;
  CompletionBatch::Add([client, status, lost] {
    if (lost) {
      client->Repeat(status);
    } else if (status.ok()) {
      client->Call();
    } else if (!client->CreateSession(status)) {
      client->Finish(status);
    }
  });
}

void StarClient::DoneThrew(const Status& thrown, void* op, const sw_result*) {
  static_cast<StarClient*>(op)->Finish(thrown);
}

void StarClient::Arrived(const Status& status, bool unknown) {
  if (!unknown) {
    if (!CreateSession(status)) Finish(status);
  } else if (++registrations_ > kMaxRegistrations) {
    Finish(MakeStatus(kAborted, "the server evicted the plan " + std::to_string(kMaxRegistrations) +
                                    " times after it was registered"));
  } else {
    Register();
  }
}

bool StarClient::CreateSession(const Status& status) {
  if (!callee_->can_recover() || !IsSessionForgotten(status) || ++sessions_ > kMaxSessions) return false;
  const uint64_t ticket = NewTicket();
  {
    std::lock_guard<std::mutex> lock(mu_);
    ticket_ = ticket;
  }
  Ref();
  CreateSessionAgain(callee_->task, where_.session, where_.channel, status, ticket, [this](const Status& created) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      ticket_ = 0;
      has_id_ = false;
    }
    if (created.ok()) {
      Call();
    } else {
      Finish(created);
    }
  });
  bool cancel;
  {
    std::lock_guard<std::mutex> lock(mu_);
    cancel = cancelled_;
  }
  // Too late is no harm.
  if (cancel) StopWaiting(ticket);
  Unref();
  return true;
}

void StarClient::Repeat(const Status& lost) {
  bool cancelled;
  {
    std::lock_guard<std::mutex> lock(mu_);
    cancelled = cancelled_;
  }
  if (lost_.ok()) lost_ = lost;
  // A server that came back lacks what the call needs, and does not notice it.
  const bool lacks = RecoverMs() != 0 && !callee_->can_recover();
  if (number_ == 0 || cancelled || lacks || ++attempt_ > kMaxAttempts) {
    Finish(lost_);
  } else {
    Call();
  }
}

void StarClient::Finish(const Status& outcome) {
  if (where_.cancellation != nullptr) where_.cancellation->DeregisterCallback(token_);
  if (number_ != 0) sw_channel_lane_give(where_.channel->handle(), lane_);
  bool cancelled;
  {
    std::lock_guard<std::mutex> lock(mu_);
    cancelled = cancelled_;
  }
  std::vector<StarValue> fetches;
  std::string stats;
  Status status = outcome;
  if (status.ok()) {
    status = Guard(
        "reading the reply to a star call", [&] { return cargo_->Finish(where_.allocator, &fetches); },
        [](const Status& thrown) { return thrown; });
  }
  if (status.ok()) {
    stats = cargo_->extra();
    if (callee_->last && where_.step != nullptr) where_.step->Freed(callee_->task);
  } else {
    // TensorFlow's executor does not know yet that the step is cancelled, while it cancels.
    status = Named(*callee_, cancelled ? AfterCancellation(status) : status);
  }
  if (keeps_) where_.step->Ended(callee_->task);
  const Done done = std::move(done_);
  Unref();
  done(status, std::move(fetches), stats);
}

}  // namespace starwire
