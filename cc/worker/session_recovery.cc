#include "cc/worker/session_recovery.h"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/worker/remote_worker.h"

namespace starwire {

using tensorflow::CreateWorkerSessionRequest;
using tensorflow::StatusCallback;

namespace {

struct Session {
  std::shared_ptr<const CreateWorkerSessionRequest> request;
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

namespace {
std::atomic<bool (*)(const tensorflow::GraphDef& graph)> recoverable{nullptr};
}  // namespace

void SetRecoverable(bool (*test)(const tensorflow::GraphDef& graph)) { recoverable.store(test); }

bool IsRecoverable(const tensorflow::GraphDef& graph) {
  const auto test = recoverable.load();
  return test != nullptr && test(graph);
}

bool IsSessionForgotten(const Status& status) {
  return StatusNumber(status) == kAborted && StatusMessage(status).find("Session handle is not found") == 0;
}

bool IsGraphForgotten(const Status& status) {
  return StatusNumber(status) == kAborted && StatusMessage(status).find("Graph handle is not found") == 0;
}

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
