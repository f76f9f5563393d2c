// A session's worker cache: TensorFlow's own, except that remote tasks are reached over starwire.
#ifndef STARWIRE_CC_WORKER_WORKER_CACHE_H_
#define STARWIRE_CC_WORKER_WORKER_CACHE_H_

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc/base/channel.h"
#include "cc/base/compat_server.h"
#include "cc/worker/remote_worker.h"
#include "cc/worker/step_handles.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/distributed_runtime/worker_cache_logger.h"
#include "tensorflow/core/protobuf/cluster.pb.h"

namespace starwire {

// Every task of a cluster: "/job:ps/replica:0/task:0" -> "host:port".
using TaskAddresses = std::map<std::string, std::string>;
TaskAddresses AddressesOf(const tensorflow::ClusterDef& cluster);
std::string TaskName(const std::string& job, int task);

class StockCache;

// The worker caches of one server. A server that stops removes TensorFlow's part from them: sessions keep their cache
// as long as they like, but that part needs threads of the server.
class WorkerCaches {
 public:
  // Drops the stock caches. True if they are destroyed, that is, none was in use.
  bool DropStock();

 private:
  friend class StockCache;
  friend class WorkerCache;
  std::mutex mu_;
  std::set<StockCache*> stock_;  // guarded by mu_
  std::once_flag advice_;
};

// TensorFlow's part of a worker cache. The cache and the eager clients that it handed out share it: TensorFlow replaces
// a cache when a cluster changes, while steps still open clients that they got from the old one.
class StockCache {
 public:
  StockCache(std::unique_ptr<tensorflow::WorkerCacheInterface> cache, std::shared_ptr<WorkerCaches> caches);
  ~StockCache();
  // Null once the server has stopped.
  std::shared_ptr<tensorflow::WorkerCacheInterface> Get() const;

 private:
  friend class WorkerCaches;
  const std::shared_ptr<WorkerCaches> caches_;
  mutable std::shared_mutex mu_;
  std::shared_ptr<tensorflow::WorkerCacheInterface> cache_;  // guarded by mu_
};

class WorkerCache : public tensorflow::WorkerCacheInterface {
 public:
  // `stock` keeps serving coordination, and the eager calls of cc/worker/eager_client.h. `local_worker` is the one for
  // `local_task`, which is in this process.
  WorkerCache(std::unique_ptr<tensorflow::WorkerCacheInterface> stock, TaskAddresses addresses, std::string local_task,
              tensorflow::WorkerInterface* local_worker, std::shared_ptr<ChannelOpener> channels,
              std::shared_ptr<WorkerCaches> caches, std::shared_ptr<HandleBoard> board);
  ~WorkerCache() override;

  void ListWorkers(std::vector<std::string>* workers) const override;
  void ListWorkersInJob(const std::string& job_name, std::vector<std::string>* workers) const override;

  // Remote workers of the cluster belong to the cache and are the same object each time. A task that has joined is a
  // new object each time, until ReleaseWorker(): this cache may outlive many, each session has its own in front. Any
  // other task is null. As with TensorFlow's own cache, `target` may name a device of the task.
  tensorflow::WorkerInterface* GetOrCreateWorker(const std::string& target) override;
  void ReleaseWorker(const std::string& target, tensorflow::WorkerInterface* worker) override;

  bool GetDeviceLocalityNonBlocking(const std::string& device, tensorflow::DeviceLocality* locality) override;
  void GetDeviceLocalityAsync(const std::string& device, tensorflow::DeviceLocality* locality,
                              tensorflow::StatusCallback done) override;
  Status GetEagerClientCache(std::unique_ptr<tensorflow::eager::EagerClientCache>* eager_client_cache) override;
  // Without `override`: 1.15 does not have it.
  Status GetCoordinationClientCache(std::unique_ptr<tensorflow::CoordinationClientCache>* coordination_client_cache);

  void SetLogging(bool active) override;
  void ClearLogs() override;
  bool RetrieveLogs(StepId step_id, tensorflow::StepStats* ss) override;

 private:
  tensorflow::WorkerInterface* CreateWorker(const std::string& target);
  tensorflow::WorkerInterface* FindJoined(const std::string& task);
  // A session without device filters asks every task for its devices, and so does every other worker's.
  void AdviseFilters();
  // "/job:ps/replica:0/task:0" of a target that may go on to name a device; empty if it names no task.
  static std::string TaskOf(const std::string& target);
  static Status Stopped(const std::string& task);

  const TaskAddresses addresses_;
  const std::string local_task_;
  tensorflow::WorkerInterface* const local_worker_;  // owned by the server
  const std::shared_ptr<ChannelOpener> channels_;
  const std::shared_ptr<WorkerCaches> caches_;
  const std::shared_ptr<HandleBoard> board_;
  const std::shared_ptr<StockCache> stock_;
  tensorflow::WorkerCacheLogger logger_;

  mutable std::shared_mutex mu_;
  // All guarded by mu_.
  std::unordered_map<std::string, std::unique_ptr<RemoteWorker>> workers_;  // by task
  std::unordered_map<std::string, RemoteWorker*> by_target_;                // by requested target
  int siblings_ = 0;                                                        // the workers_ of the local task's job
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_WORKER_CACHE_H_
