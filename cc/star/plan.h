// A plan that a worker registered, compiled: what a star call runs.
#ifndef STARWIRE_CC_STAR_PLAN_H_
#define STARWIRE_CC_STAR_PLAN_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "cc/base/errands.h"
#include "cc/executor/session_subgraph.h"
#include "cc/star/object.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/graph.pb.h"

namespace starwire {

// The table of plans holds one reference, each run another. The last one ends it on another thread: kernels take a
// while to go.
class StarPlan : public StarObject {
 public:
  // Plans that exist; to be waited for before the devices go.
  using Census = std::shared_ptr<std::atomic<int64_t>>;

  // `graph` is on one CPU of `session`. `has_state`: see HasKernelState(); then the plan is for `handle` only.
  static Status Compile(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                        const tensorflow::GraphDef& graph, bool has_state, int threads, Census census,
                        std::shared_ptr<ServerErrands> errands, StarPlan** out);

  const SessionSubgraph& subgraph() const { return *subgraph_; }
  tensorflow::DeviceMgr* device_mgr() const { return session_->device_mgr(); }
  // Some kernel wants a step container of its own.
  bool needs_container() const { return needs_container_; }
  // Some kernel calls functions, which want a rendezvous.
  bool needs_rendezvous() const { return needs_rendezvous_; }

  // Whether a run may take place on a reactor: no kernel can wait, and they have been seen to take no more than
  // `limit_ns` together.
  bool RunsInline(uint64_t limit_ns);
  // A run took so long from its first kernel to its answer.
  void Ran(uint64_t ns, bool on_reactor, uint64_t limit_ns);

 private:
  StarPlan() = default;
  ~StarPlan() override;
  void Retire() override;

  Census census_;
  std::shared_ptr<ServerErrands> errands_;
  std::shared_ptr<tensorflow::WorkerSession> session_;
  std::unique_ptr<SessionSubgraph> subgraph_;
  bool may_wait_ = true;
  bool needs_container_ = false;
  bool needs_rendezvous_ = false;
  std::atomic<uint32_t> runs_{0};
  // Runs that still have to take place elsewhere because one on a reactor took long.
  std::atomic<int32_t> banished_{0};
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_PLAN_H_
