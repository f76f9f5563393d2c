#include "cc/server/local_masters.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/base/compat_server.h"
#include "cc/worker/remote_worker.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"

namespace starwire {
namespace {

// The cluster of a stopped server: one task, whose every call fails.
class ClosedWorkerCache : public tensorflow::WorkerCacheInterface {
 public:
  explicit ClosedWorkerCache(const std::string& target)
      : reason_(MakeStatus(kUnavailable, "the server at " + target + " was stopped")),
        worker_(kTask, reason_, nullptr) {}

  void ListWorkers(std::vector<std::string>* workers) const override { workers->assign(1, kTask); }
  void ListWorkersInJob(const std::string&, std::vector<std::string>* workers) const override { workers->clear(); }
  tensorflow::WorkerInterface* GetOrCreateWorker(const std::string&) override { return &worker_; }
  void ReleaseWorker(const std::string&, tensorflow::WorkerInterface*) override {}
  bool GetDeviceLocalityNonBlocking(const std::string&, tensorflow::DeviceLocality*) override { return false; }
  void GetDeviceLocalityAsync(const std::string&, tensorflow::DeviceLocality*,
                              tensorflow::StatusCallback done) override {
    done(reason_);
  }
  Status GetEagerClientCache(std::unique_ptr<tensorflow::eager::EagerClientCache>*) override { return reason_; }
  // Without `override`: 1.15 does not have it.
  Status GetCoordinationClientCache(std::unique_ptr<tensorflow::CoordinationClientCache>*) { return reason_; }

  const Status& reason() const { return reason_; }

 private:
  static constexpr char kTask[] = "/job:stopped/replica:0/task:0";
  const Status reason_;
  RemoteWorker worker_;
};

std::mutex* Mutex() {
  static auto* mu = new std::mutex;
  return mu;
}

// By target: the environment of the master in TensorFlow's table. Never freed, like that table.
std::map<std::string, tensorflow::MasterEnv*>* Registered() {
  static auto* registered = new std::map<std::string, tensorflow::MasterEnv*>;
  return registered;
}

void Close(const std::string& target, tensorflow::MasterEnv* env) {
  auto* cache = new ClosedWorkerCache(target);  // never freed, like `env`
  env->worker_cache = cache;
  env->local_devices.clear();
  env->worker_cache_factory = [cache](const tensorflow::WorkerCacheFactoryOptions&,
                                      tensorflow::WorkerCacheInterface**) { return cache->reason(); };
}

}  // namespace

void PointLocalMasterAt(const std::string& target, tensorflow::MasterEnv* own, const tensorflow::MasterEnv& env) {
  std::lock_guard<std::mutex> lock(*Mutex());
  *own = env;
  tensorflow::MasterEnv*& registered = (*Registered())[target];
  if (registered == nullptr) {
    registered = own;
  } else if (registered != own) {
    *registered = env;
  }
}

void CloseMaster(const std::string& target, tensorflow::MasterEnv* own) {
  std::lock_guard<std::mutex> lock(*Mutex());
  Close(target, own);
  auto found = Registered()->find(target);
  // A later server may have taken over the entry, but it stops before its successor at the same port can start.
  if (found != Registered()->end() && found->second != own) Close(target, found->second);
}

}  // namespace starwire
