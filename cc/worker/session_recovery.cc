#include "cc/worker/session_recovery.h"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/worker/worker_call.h"

namespace starwire {

using tensorflow::CreateWorkerSessionRequest;
using tensorflow::StatusCallback;

namespace {

struct Session {
  std::shared_ptr<const CreateWorkerSessionRequest> request;
  bool was_created_again = false;
  // Who waits for its creation; empty: it is not being created.
  std::vector<StatusCallback> waiting;
};

struct Sessions {
  std::mutex mu;
  std::map<std::pair<std::string, std::string>, Session> kept;  // by task and handle; guarded by mu
};

Sessions* AllSessions() {
  static auto* const sessions = new Sessions;
  return sessions;
}

void Created(const std::string& task, const std::string& handle, const Status& status) {
  std::vector<StatusCallback> waiting;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    const auto found = sessions->kept.find({task, handle});
    if (found != sessions->kept.end()) waiting.swap(found->second.waiting);
  }
  for (const StatusCallback& done : waiting) done(status);
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
  std::vector<StatusCallback> waiting;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    const auto found = sessions->kept.find({task, handle});
    if (found == sessions->kept.end()) return;
    waiting = std::move(found->second.waiting);
    sessions->kept.erase(found);
  }
  for (const StatusCallback& done : waiting) done(MakeStatus(kCancelled, "the session was deleted"));
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
                        const Status& status, StatusCallback done) {
  std::shared_ptr<const CreateWorkerSessionRequest> request;
  bool is_first = false;
  {
    Sessions* sessions = AllSessions();
    std::lock_guard<std::mutex> lock(sessions->mu);
    const auto found = sessions->kept.find({task, handle});
    if (found != sessions->kept.end()) {
      request = found->second.request;
      is_first = found->second.waiting.empty();
      // Before the request is sent: whatever is sent after it may find the session.
      found->second.was_created_again = true;
      found->second.waiting.push_back(std::move(done));
    }
  }
  if (request == nullptr) {
    done(status);
  } else if (is_first) {
    CallTask(channel, task, Method::kCreateWorkerSession, request,
             [task, handle](const Status& created) { Created(task, handle, created); });
  }
}

}  // namespace starwire
