// How a feature extends a worker: declared here, implemented in a higher folder.
#ifndef STARWIRE_CC_WORKER_HOOKS_H_
#define STARWIRE_CC_WORKER_HOOKS_H_

#include <functional>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// Notified when sessions of a worker end, and when their graphs may have changed variables.
class SessionObserver {
 public:
  virtual ~SessionObserver() = default;
  // The session's master deletes it.
  virtual void SessionClosed(const std::string& handle) = 0;
  // Resources of all sessions are about to be dropped (CleanupAll): those in these containers, or, if there are none,
  // in the default ones.
  virtual void CleansUp(const std::vector<std::string>& containers) = 0;
  // Whether the server's variables outlive its process.
  virtual bool KeepsState() const = 0;
  // What is to be called after each run of this graph of a session; null: it changes nothing that outlives the process.
  virtual std::function<void()> ChangesOf(const std::string& session, const tensorflow::GraphDef& graph) = 0;
  // The same after CleanupAll.
  virtual void AllChanged() = 0;
  // Calls `then` when a run's caller may hear of changes: at once, or when they are written. With an error: they may
  // not have been.
  virtual void WhenWritten(std::function<void(const Status& status)> then) = 0;
};

// A feature that rewrites graphs: what it does when a worker registers and runs them.
class GraphFeature {
 public:
  virtual ~GraphFeature() = default;
  // An error refuses the graph.
  virtual Status Check(const tensorflow::RegisterGraphRequest& request) const = 0;
  // The client asked for the graphs that it ran.
  virtual void ShowGraphs(tensorflow::MutableRunGraphResponseWrapper* response) const = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_HOOKS_H_
