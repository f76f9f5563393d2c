// Sessions that a server has forgotten because it was restarted, although it has its variables back: they are created
// again, as their master created them.
#ifndef STARWIRE_CC_WORKER_SESSION_RECOVERY_H_
#define STARWIRE_CC_WORKER_SESSION_RECOVERY_H_

#include <memory>
#include <string>

#include "cc/base/channel.h"
#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// A master of this process has created a session on a task, or deletes it. Sessions with isolated state are not kept:
// their variables are gone.
void KeepSession(const std::string& task, const tensorflow::CreateWorkerSessionRequest& request);
void DropSession(const std::string& task, const std::string& handle);

// Whether a graph uses nothing of its server but what the state of one keeps: `test` says so. Before servers start.
void SetRecoverable(bool (*test)(const tensorflow::GraphDef& graph));
bool IsRecoverable(const tensorflow::GraphDef& graph);

// Whether a task has answered that it does not know the session, or the graph.
bool IsSessionForgotten(const Status& status);
bool IsGraphForgotten(const Status& status);

// Creates the session again, once for all that ask meanwhile. `status` is the result if the session is not kept.
void CreateSessionAgain(const std::string& task, const std::string& handle, const std::shared_ptr<Channel>& channel,
                        const Status& status, tensorflow::StatusCallback done);

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_SESSION_RECOVERY_H_
