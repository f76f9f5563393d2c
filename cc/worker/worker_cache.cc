#include "cc/worker/worker_cache.h"

#include <utility>

#if STARWIRE_EAGER_PORT
#include "cc/worker/eager_client.h"
#endif
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::WorkerCacheInterface;
using tensorflow::WorkerInterface;

namespace {

// With fewer tasks in a job, sessions that ask all of them are no burden.
constexpr int kManySiblings = 16;

class JoinedWorker final : public RemoteWorker {
 public:
  using RemoteWorker::RemoteWorker;
};

std::string JobOf(const std::string& task) { return task.substr(0, task.find("/replica:")); }

}  // namespace

std::string TaskName(const std::string& job, int task) {
  return "/job:" + job + "/replica:0/task:" + std::to_string(task);
}

TaskAddresses AddressesOf(const tensorflow::ClusterDef& cluster) {
  TaskAddresses addresses;
  for (const auto& job : cluster.job()) {
    for (const auto& task : job.tasks()) addresses[TaskName(job.name(), task.first)] = task.second;
  }
  return addresses;
}

bool WorkerCaches::DropStock() {
  bool gone = true;
  std::lock_guard<std::mutex> lock(mu_);
  for (StockCache* stock : stock_) {
    std::shared_ptr<WorkerCacheInterface> cache;
    {
      std::unique_lock<std::shared_mutex> stock_lock(stock->mu_);
      cache.swap(stock->cache_);
    }
    const std::weak_ptr<WorkerCacheInterface> rest = cache;
    cache.reset();
    if (!rest.expired()) gone = false;
  }
  return gone;
}

StockCache::StockCache(std::unique_ptr<WorkerCacheInterface> cache, std::shared_ptr<WorkerCaches> caches)
    : caches_(std::move(caches)), cache_(std::move(cache)) {
  std::lock_guard<std::mutex> lock(caches_->mu_);
  caches_->stock_.insert(this);
}

StockCache::~StockCache() {
  std::lock_guard<std::mutex> lock(caches_->mu_);
  caches_->stock_.erase(this);
}

std::shared_ptr<WorkerCacheInterface> StockCache::Get() const {
  std::shared_lock<std::shared_mutex> lock(mu_);
  return cache_;
}

WorkerCache::WorkerCache(std::unique_ptr<WorkerCacheInterface> stock, TaskAddresses addresses, std::string local_task,
                         WorkerInterface* local_worker, std::shared_ptr<ChannelOpener> channels,
                         std::shared_ptr<WorkerCaches> caches, std::shared_ptr<HandleBoard> board)
    : addresses_(std::move(addresses)),
      local_task_(std::move(local_task)),
      local_worker_(local_worker),
      channels_(std::move(channels)),
      caches_(std::move(caches)),
      board_(std::move(board)),
      stock_(std::make_shared<StockCache>(std::move(stock), caches_)) {}

WorkerCache::~WorkerCache() = default;

Status WorkerCache::Stopped(const std::string& task) {
  return MakeStatus(kUnavailable, "the server of " + task + " was stopped");
}

void WorkerCache::ListWorkers(std::vector<std::string>* workers) const {
  workers->clear();
  if (const auto stock = stock_->Get()) stock->ListWorkers(workers);
}

void WorkerCache::ListWorkersInJob(const std::string& job_name, std::vector<std::string>* workers) const {
  workers->clear();
  if (const auto stock = stock_->Get()) stock->ListWorkersInJob(job_name, workers);
}

std::string WorkerCache::TaskOf(const std::string& target) {
  tensorflow::DeviceNameUtils::ParsedName name;
  if (!tensorflow::DeviceNameUtils::ParseFullName(target, &name) || !name.has_job || !name.has_replica ||
      name.replica != 0 || !name.has_task) {
    return std::string();
  }
  return TaskName(name.job, name.task);
}

WorkerInterface* WorkerCache::GetOrCreateWorker(const std::string& target) {
  if (target == local_task_) return local_worker_;
  {
    std::shared_lock<std::shared_mutex> lock(mu_);
    auto found = by_target_.find(target);
    if (found != by_target_.end()) return found->second;
  }
  return CreateWorker(target);
}

WorkerInterface* WorkerCache::CreateWorker(const std::string& target) {
  const std::string task = TaskOf(target);
  if (task == local_task_) return local_worker_;
  const auto address = addresses_.find(task);
  if (address == addresses_.end()) return FindJoined(task);
  std::unique_lock<std::shared_mutex> lock(mu_);
  std::unique_ptr<RemoteWorker>& worker = workers_[task];
  if (worker == nullptr) {
    std::shared_ptr<Channel> channel;
    const Status opened =
        stock_->Get() == nullptr ? Stopped(local_task_) : channels_->OpenChannel(task, address->second, &channel);
    worker = opened.ok() ? std::make_unique<RemoteWorker>(task, std::move(channel), &logger_)
                         : std::make_unique<RemoteWorker>(task, opened, &logger_);
    if (JobOf(task) == JobOf(local_task_) && ++siblings_ == kManySiblings) AdviseFilters();
  }
  by_target_[target] = worker.get();
  return worker.get();
}

WorkerInterface* WorkerCache::FindJoined(const std::string& task) {
  if (task.empty() || stock_->Get() == nullptr) return nullptr;
  std::shared_ptr<Channel> channel;
  const Status opened = channels_->OpenChannel(task, "", &channel);
  if (opened.ok()) return new JoinedWorker(task, std::move(channel), &logger_);
  return StatusNumber(opened) == kNotFound ? nullptr : new JoinedWorker(task, opened, &logger_);
}

void WorkerCache::AdviseFilters() {
  std::call_once(caches_->advice_, [this] {
    LOG(WARNING) << "starwire: a session of " << local_task_ << " asks the other tasks of " << JobOf(local_task_)
                 << " for their devices and waits for all of them; sessions that use only parameter servers and their"
                 << " own task should set ConfigProto(device_filters=[\"/job:ps\", \"" << JobOf(local_task_)
                 << local_task_.substr(local_task_.find("/task:")) << "\"])";
  });
}

// Other workers belong to the cache, or to the server.
void WorkerCache::ReleaseWorker(const std::string&, WorkerInterface* worker) {
  delete dynamic_cast<JoinedWorker*>(worker);
}

bool WorkerCache::GetDeviceLocalityNonBlocking(const std::string& device, tensorflow::DeviceLocality* locality) {
  const auto stock = stock_->Get();
  return stock != nullptr && stock->GetDeviceLocalityNonBlocking(device, locality);
}

void WorkerCache::GetDeviceLocalityAsync(const std::string& device, tensorflow::DeviceLocality* locality,
                                         tensorflow::StatusCallback done) {
  auto stock = stock_->Get();
  if (stock == nullptr) {
    done(Stopped(local_task_));
    return;
  }
  WorkerCacheInterface* asked = stock.get();
  asked->GetDeviceLocalityAsync(device, locality,
                                [stock = std::move(stock), done = std::move(done)](const Status& s) mutable {
                                  stock.reset();
                                  done(s);
                                });
}

Status WorkerCache::GetEagerClientCache(std::unique_ptr<tensorflow::eager::EagerClientCache>* eager_client_cache) {
  const auto stock = stock_->Get();
  if (stock == nullptr) return Stopped(local_task_);
#if STARWIRE_EAGER_PORT
  std::unique_ptr<tensorflow::eager::EagerClientCache> plain;
  const Status status = stock->GetEagerClientCache(&plain);
  if (!status.ok()) return status;
  // It may outlive this object.
  auto open = [addresses = addresses_, local_task = local_task_, channels = channels_,
               shared = stock_](const std::string& target) {
    std::unique_ptr<RemoteEager> worker;
    const std::string task = TaskOf(target);
    const auto address = addresses.find(task);
    if (task == local_task || address == addresses.end()) return worker;
    std::shared_ptr<Channel> channel;
    Status opened = Stopped(local_task);
    if (shared->Get() != nullptr) opened = channels->OpenChannel(task, address->second, &channel);
    worker = opened.ok() ? std::make_unique<RemoteEager>(task, std::move(channel), nullptr)
                         : std::make_unique<RemoteEager>(task, opened, nullptr);
    return worker;
  };
  *eager_client_cache = std::make_unique<EagerPortClientCache>(std::move(plain), std::move(open), board_);
  return OkStatus();
#else
  return stock->GetEagerClientCache(eager_client_cache);
#endif
}

Status WorkerCache::GetCoordinationClientCache(
    std::unique_ptr<tensorflow::CoordinationClientCache>* coordination_client_cache) {
  const auto stock = stock_->Get();
  return stock == nullptr ? Stopped(local_task_) : CoordinationClients(stock.get(), coordination_client_cache);
}

void WorkerCache::SetLogging(bool active) {
  logger_.SetLogging(active);
  if (const auto stock = stock_->Get()) stock->SetLogging(active);
}

void WorkerCache::ClearLogs() {
  logger_.ClearLogs();
  if (const auto stock = stock_->Get()) stock->ClearLogs();
}

bool WorkerCache::RetrieveLogs(StepId step_id, tensorflow::StepStats* ss) {
  bool any = logger_.RetrieveLogs(step_id, ss);
  if (const auto stock = stock_->Get()) any = stock->RetrieveLogs(step_id, ss) || any;
  return any;
}

}  // namespace starwire
