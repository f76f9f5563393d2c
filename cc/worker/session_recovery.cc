#include "cc/worker/session_recovery.h"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "cc/base/completion_batch.h"
#include "cc/worker/worker_call.h"

namespace starwire {

using tensorflow::CreateWorkerSessionRequest;
using tensorflow::StatusCallback;

namespace {

// By ticket.
using Waiting = std::map<uint64_t, StatusCallback>;

struct Session {
  std::shared_ptr<const CreateWorkerSessionRequest> request;
  bool was_created_again = false;
  bool is_being_created = false;
  Waiting waiting;
};

struct Sessions {
  std::mutex mu;
  std::map<std::pair<std::string, std::string>, Session> kept;  // by task and handle; guarded by mu
};

Sessions* AllSessions() {
  static auto* const sessions = new Sessions;
  return sessions;
}

void Created(const std::string& task, const std::string& handle, const std::shared_ptr<Channel>& channel,
             const Status& status) {
  Waiting waiting;
  bool was_dropped = false;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    const auto found = sessions->kept.find({task, handle});
    was_dropped = found == sessions->kept.end();
    if (!was_dropped) {
      found->second.is_being_created = false;
      waiting.swap(found->second.waiting);
    }
  }
  // Its master has deleted it already, or tried to.
  if (was_dropped && status.ok()) {
    auto request = std::make_shared<tensorflow::DeleteWorkerSessionRequest>();
    request->set_session_handle(handle);
    CallTask(channel, task, Method::kDeleteWorkerSession, std::move(request), [](const Status&) {});
  }
  for (const auto& entry : waiting) entry.second(status);
}

}  // namespace

void SayThatStateIsKept(tensorflow::CreateWorkerSessionResponse* response) {
  // A field that TensorFlow's message does not have, and leaves alone.
  response->ParseFromString(std::string("\x08\x01", 2));
}

bool IsStateKept(const tensorflow::CreateWorkerSessionResponse& response) { return response.ByteSizeLong() > 0; }

void KeepSession(const std::string& task, const CreateWorkerSessionRequest& request) {
  if (request.isolate_session_state()) return;
  Sessions* sessions = AllSessions();
  std::lock_guard<std::mutex> lock(sessions->mu);
  sessions->kept[{task, request.session_handle()}].request = std::make_shared<CreateWorkerSessionRequest>(request);
}

void DropSession(const std::string& task, const std::string& handle) {
  Waiting waiting;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    const auto found = sessions->kept.find({task, handle});
    if (found == sessions->kept.end()) return;
    waiting = std::move(found->second.waiting);
    sessions->kept.erase(found);
  }
  for (const auto& entry : waiting) entry.second(MakeStatus(kCancelled, "the session was deleted"));
}

bool IsSessionKept(const std::string& task, const std::string& handle) {
  Sessions* sessions = AllSessions();
  std::lock_guard<std::mutex> lock(sessions->mu);
  return sessions->kept.count({task, handle}) != 0;
}

namespace {

std::atomic<Needs (*)(const tensorflow::GraphDef& graph)> graph_needs{nullptr};

// An error of another task is marked as derived when it has ended a step.
bool IsOwnAbort(const Status& status, const char* message) {
  return StatusNumber(status) == kAborted && StatusMessage(status).find(message) == 0 &&
         !tensorflow::StatusGroup::IsDerived(status);
}

}  // namespace

void SetNeedsOf(Needs (*needs_of)(const tensorflow::GraphDef& graph)) { graph_needs.store(needs_of); }

Needs GraphNeeds(const tensorflow::GraphDef& graph) {
  const auto needs_of = graph_needs.load();
  return needs_of == nullptr ? Needs::kMore : needs_of(graph);
}

Status CheckNeeds(Needs needs, const std::string& task, const std::string& handle) {
  if (needs != Needs::kObjects) return OkStatus();
  Sessions* sessions = AllSessions();
  std::lock_guard<std::mutex> lock(sessions->mu);
  const auto found = sessions->kept.find({task, handle});
  if (found == sessions->kept.end() || !found->second.was_created_again) return OkStatus();
  return MakeStatus(kAborted, "starwire: " + task +
                                  " was restarted, and lacks a queue, table or other object of this session: close it, "
                                  "and open another one");
}

bool IsSessionForgotten(const Status& status) { return IsOwnAbort(status, "Session handle is not found"); }

bool IsGraphForgotten(const Status& status) { return IsOwnAbort(status, "Graph handle is not found"); }

void CreateSessionAgain(const std::string& task, const std::string& handle, const std::shared_ptr<Channel>& channel,
                        const Status& status, uint64_t ticket, StatusCallback done) {
  std::shared_ptr<const CreateWorkerSessionRequest> request;
  bool is_first = false;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    const auto found = sessions->kept.find({task, handle});
    if (found != sessions->kept.end()) {
      request = found->second.request;
      is_first = !std::exchange(found->second.is_being_created, true);
      // Before the request is sent: whatever is sent after it may find the session.
      found->second.was_created_again = true;
      found->second.waiting[ticket] = std::move(done);
    }
  }
  if (request == nullptr) {
    done(status);
  } else if (is_first) {
    CallTask(channel, task, Method::kCreateWorkerSession, request,
             [task, handle, channel](const Status& created) { Created(task, handle, channel, created); });
  }
}

uint64_t NewTicket() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void StopWaiting(uint64_t ticket) {
  StatusCallback done;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    for (auto& entry : sessions->kept) {
      const auto found = entry.second.waiting.find(ticket);
      if (found == entry.second.waiting.end()) continue;
      done = std::move(found->second);
      entry.second.waiting.erase(found);
      break;
    }
  }
  if (done == nullptr) return;
  // The cancelling thread may hold a lock that the completion takes.
  CompletionBatch::DeferScope defer;
  CompletionBatch::Add([done = std::move(done)] { done(MakeStatus(kCancelled, "the step was cancelled")); });
}

}  // namespace starwire
