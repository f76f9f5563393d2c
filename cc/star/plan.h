// A compiled plan: the graph that a star call runs.
#ifndef STARWIRE_CC_STAR_PLAN_H_
#define STARWIRE_CC_STAR_PLAN_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/background_queue.h"
#include "cc/base/compat.h"
#include "cc/executor/session_subgraph.h"
#include "cc/star/feed_sizes.h"
#include "cc/star/object.h"
#include "cc/star/state.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/graph.pb.h"

namespace starwire {

// An attribute of the arguments of a plan that are handles of an eager context: the call names them, in one feed that
// follows the others.
extern const char kHandleAttr[];

// The transport holds one reference, each run another. The last one deletes it on another thread, because kernels take
// time to delete.
class StarPlan : public StarObject {
 public:
  // The number of plans that exist. Devices must outlive them.
  using Census = std::shared_ptr<std::atomic<int64_t>>;

  // `graph` is placed on one CPU of `session`. `has_state`: see HasKernelState(); then the plan is for `handle` only.
  static Status Compile(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                        const tensorflow::GraphDef& graph, bool has_state, int threads, Census census,
                        std::shared_ptr<ServerQueues> queues, StarPlan** out);

  const SessionSubgraph& subgraph() const { return *subgraph_; }
  tensorflow::DeviceMgr* device_mgr() const { return session_->device_mgr(); }
  // Some kernel needs its own step container.
  bool needs_container() const { return needs_container_; }
  // Some kernel calls functions, which need a rendezvous.
  bool needs_rendezvous() const { return needs_rendezvous_; }

  // How many of the last feeds are handles.
  size_t num_handles() const { return num_handles_; }

  // Some kernel may wait, or may take long with feeds of any size.
  bool may_wait() const { return may_wait_; }

  // Runs end by themselves: no kernel waits for anything.
  bool ends_alone() const { return ends_alone_; }

  // A second run may change something: some kernel may do more than compute its outputs.
  bool has_effects() const { return has_effects_; }

  // What a run may change of the server's state.
  const std::vector<StateUpdate>& updates() const { return updates_; }
  void SetUpdates(std::vector<StateUpdate> updates) { updates_ = std::move(updates); }

  // The sizes of the feeds of runs that were short.
  FeedSizes* short_runs() { return &short_runs_; }

 private:
  StarPlan() = default;
  ~StarPlan() override;
  void Retire() override;

  Census census_;
  std::shared_ptr<ServerQueues> queues_;
  std::shared_ptr<tensorflow::WorkerSession> session_;
  std::unique_ptr<SessionSubgraph> subgraph_;
  size_t num_handles_ = 0;
  bool may_wait_ = true;
  bool ends_alone_ = false;
  bool has_effects_ = false;
  std::vector<StateUpdate> updates_;
  FeedSizes short_runs_;
  bool needs_container_ = false;
  bool needs_rendezvous_ = false;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_PLAN_H_
