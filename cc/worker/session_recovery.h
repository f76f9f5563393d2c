// Sessions that a server has forgotten because it was restarted, although it has its variables back: they are created
// again, as their master created them.
#ifndef STARWIRE_CC_WORKER_SESSION_RECOVERY_H_
#define STARWIRE_CC_WORKER_SESSION_RECOVERY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "cc/base/channel.h"
#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// A server with a state says so when it creates a session. On any other, a session that is created again would go on
// with variables that have no value.
void SayThatStateIsKept(tensorflow::CreateWorkerSessionResponse* response);
bool IsStateKept(const tensorflow::CreateWorkerSessionResponse& response);

// A master of this process has created a session on a task with a state, or deletes it. Sessions with isolated state
// are not kept: their variables are gone.
void KeepSession(const std::string& task, const tensorflow::CreateWorkerSessionRequest& request);
void DropSession(const std::string& task, const std::string& handle);
bool IsSessionKept(const std::string& task, const std::string& handle);

// What a graph needs of its server.
enum class Needs : uint8_t {
  kState,    // nothing but what a state keeps
  kMore,     // files, say, or random numbers
  kObjects,  // objects of the session that a server lacks which came back: whoever takes from a queue would wait
             // forever
};

// `needs_of` finds it out. Before servers start.
void SetNeedsOf(Needs (*needs_of)(const tensorflow::GraphDef& graph));
Needs GraphNeeds(const tensorflow::GraphDef& graph);
// OK unless the session was created again, and so lacks what is needed.
Status CheckNeeds(Needs needs, const std::string& task, const std::string& handle);

// Whether a task has answered that it does not know the session, or the graph. An error that it got from another task
// says nothing about this one.
bool IsSessionForgotten(const Status& status);
bool IsGraphForgotten(const Status& status);

// Creates the session again, once for all that ask meanwhile. `status` is the result if the session is not kept.
// `ticket`: of StopWaiting().
void CreateSessionAgain(const std::string& task, const std::string& handle, const std::shared_ptr<Channel>& channel,
                        const Status& status, uint64_t ticket, tensorflow::StatusCallback done);

// A number for one that waits for a session. StopWaiting() ends its wait, soon and on another thread, with Cancelled;
// it does nothing before or after the wait.
uint64_t NewTicket();
void StopWaiting(uint64_t ticket);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_SESSION_RECOVERY_H_
