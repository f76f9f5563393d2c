// A session's worker cache: TensorFlow's own, except that remote tasks are reached over starwire.
#ifndef STARWIRE_CC_WORKER_WORKER_CACHE_H_
#define STARWIRE_CC_WORKER_WORKER_CACHE_H_

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "cc/compat.h"
#include "cc/server/engine.h"
#include "cc/server/resolver.h"
#include "cc/worker/remote_worker.h"
#include "tensorflow/core/distributed_runtime/worker_cache_logger.h"
#include "tensorflow/core/distributed_runtime/worker_cache_wrapper.h"
#include "tensorflow/core/protobuf/cluster.pb.h"

namespace starwire {

// Every task of a cluster: "/job:ps/replica:0/task:0" -> "host:port".
using TaskAddresses = std::map<std::string, std::string>;
TaskAddresses AddressesOf(const tensorflow::ClusterDef& cluster);
std::string TaskName(const std::string& job, int task);

class WorkerCache : public tensorflow::WorkerCacheWrapper {
 public:
  // `stock` keeps serving the local task (in this process), eager execution and coordination.
  WorkerCache(std::shared_ptr<tensorflow::WorkerCacheInterface> stock, TaskAddresses addresses, std::string local_task,
              std::shared_ptr<Engine> engine, std::shared_ptr<Resolver> resolver);
  ~WorkerCache() override;

  // Remote workers belong to the cache and are the same object each time; a task that is not in the cluster is null. As with TensorFlow's own cache,
  // `target` may name a device of the task.
  tensorflow::WorkerInterface* GetOrCreateWorker(const std::string& target) override;
  void ReleaseWorker(const std::string& target, tensorflow::WorkerInterface* worker) override;

  void SetLogging(bool active) override;
  void ClearLogs() override;
  bool RetrieveLogs(int64_t step_id, tensorflow::StepStats* ss) override;

 private:
  tensorflow::WorkerInterface* CreateWorker(const std::string& target);
  // "/job:ps/replica:0/task:0" of a target that may go on to name a device; empty if it names no task.
  static std::string TaskOf(const std::string& target);

  const std::shared_ptr<tensorflow::WorkerCacheInterface> stock_;
  const TaskAddresses addresses_;
  const std::string local_task_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Resolver> resolver_;
  tensorflow::WorkerCacheLogger logger_;
  std::shared_mutex mu_;
  // Both guarded by mu_. By task, and by every target that was asked for.
  std::unordered_map<std::string, std::unique_ptr<RemoteWorker>> workers_;
  std::unordered_map<std::string, RemoteWorker*> by_target_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_WORKER_CACHE_H_
