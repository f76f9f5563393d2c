// How features extend a worker: declared here, implemented in higher folders.
#ifndef STARWIRE_CC_WORKER_HOOKS_H_
#define STARWIRE_CC_WORKER_HOOKS_H_

#include <functional>
#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// Notified when sessions of a worker end.
class SessionObserver {
 public:
  virtual ~SessionObserver() = default;
  // The session's master deletes it.
  virtual void SessionClosed(const std::string& handle) = 0;
  // Resources of all sessions are being dropped (CleanupAll).
  virtual void AllCleanedUp() = 0;
};

// A feature that rewrites graphs: what else it does when a worker registers and runs them, and how clients get to see
// the graphs that they know.
class GraphFeature {
 public:
  virtual ~GraphFeature() = default;
  // An error refuses the graph.
  virtual Status Check(const tensorflow::RegisterGraphRequest&) const { return OkStatus(); }
  // Calls `next`, which registers the graph on this thread, and meanwhile provides what the feature's pass needs.
  // `threads`: how many may work on one run of the graph.
  virtual void Register(const tensorflow::RegisterGraphRequest&, int threads, const std::function<void()>& next) const {
    next();
  }
  // The client asked for the graphs that it ran.
  virtual void ShowGraphs(tensorflow::MutableRunGraphResponseWrapper*) const {}
  // An error of a graph, in terms of the graph that the client knows.
  virtual Status Translate(const Status& status) const { return status; }
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_HOOKS_H_
