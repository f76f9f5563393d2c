// Finds a task's data port by asking its gRPC port.
#ifndef STARWIRE_CC_WORKER_RESOLVER_H_
#define STARWIRE_CC_WORKER_RESOLVER_H_

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"

namespace starwire {

class Resolver : public std::enable_shared_from_this<Resolver> {
 public:
  // `protocol` is for the error message when a server speaks another one.
  explicit Resolver(std::string protocol);
  ~Resolver();
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;

  // `stock` is a worker cache of TensorFlow's whose cluster has `task` at `address`. The last one registered is used.
  void Register(const std::string& task, const std::string& address,
                std::shared_ptr<tensorflow::WorkerCacheInterface> stock);

  // Answers with sw_engine_resolved(engine, token, …) exactly once, from another thread, within little more than
  // kTimeoutMs. Does not block.
  void Resolve(std::shared_ptr<sw_engine> engine, const std::string& task, const std::string& address, uint64_t token);

  // Cancels queries in progress, waits for them, and drops the worker caches.
  void Shutdown();

  static constexpr int64_t kTimeoutMs = 10000;

 private:
  struct Query;
  using Task = std::pair<std::string, std::string>;
  void Ask(std::shared_ptr<Query> query);
  void Answered(const std::shared_ptr<Query>& query, const Status& status);
  // Answers a query with the answer to `asked`, which may be another one.
  void Answer(const std::shared_ptr<Query>& query, const Query& asked, const Status& status);
  // For calls that may never end (kStatusCallsEnd): one per task, for all queries that come before it ends. Whether
  // `query` is the first.
  bool IsFirst(const std::shared_ptr<Query>& query);
  // Gives up a query whose call goes on.
  void GiveUp(const std::shared_ptr<Query>& query, const std::string& reason);

  const std::string protocol_;
  std::mutex mu_;
  std::condition_variable idle_;
  bool shut_down_ = false;
  // (task, address): sessions may give the same task different addresses (ClusterSpec propagation).
  std::map<Task, std::shared_ptr<tensorflow::WorkerCacheInterface>> caches_;
  std::set<std::shared_ptr<Query>> queries_;
  // Those that share a call, by task; there is an entry while the call is in progress.
  std::map<Task, std::set<std::shared_ptr<Query>>> sharing_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_RESOLVER_H_
