#include "cc/worker/worker_cache.h"

#include <mutex>
#include <utility>

#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

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

WorkerCache::WorkerCache(std::shared_ptr<tensorflow::WorkerCacheInterface> stock, TaskAddresses addresses,
                         std::string local_task, std::shared_ptr<Engine> engine, std::shared_ptr<Resolver> resolver)
    : WorkerCacheWrapper(stock.get()),
      stock_(std::move(stock)),
      addresses_(std::move(addresses)),
      local_task_(std::move(local_task)),
      engine_(std::move(engine)),
      resolver_(std::move(resolver)) {}

WorkerCache::~WorkerCache() = default;

std::string WorkerCache::TaskOf(const std::string& target) {
  tensorflow::DeviceNameUtils::ParsedName name;
  if (!tensorflow::DeviceNameUtils::ParseFullName(target, &name) || !name.has_job || !name.has_replica ||
      name.replica != 0 || !name.has_task) {
    return std::string();
  }
  return TaskName(name.job, name.task);
}

tensorflow::WorkerInterface* WorkerCache::GetOrCreateWorker(const std::string& target) {
  if (target == local_task_) return stock_->GetOrCreateWorker(target);
  {
    std::shared_lock<std::shared_mutex> lock(mu_);
    auto found = by_target_.find(target);
    if (found != by_target_.end()) return found->second;
  }
  return CreateWorker(target);
}

tensorflow::WorkerInterface* WorkerCache::CreateWorker(const std::string& target) {
  const std::string task = TaskOf(target);
  if (task == local_task_) return stock_->GetOrCreateWorker(local_task_);
  const auto address = addresses_.find(task);
  if (address == addresses_.end()) return nullptr;
  resolver_->Register(task, address->second, stock_);
  std::unique_lock<std::shared_mutex> lock(mu_);
  std::unique_ptr<RemoteWorker>& worker = workers_[task];
  if (worker == nullptr) {
    std::shared_ptr<Channel> channel;
    const Status opened = engine_->OpenChannel(task, address->second, &channel);
    if (opened.ok()) {
      worker = std::make_unique<RemoteWorker>(task, std::move(channel), &logger_);
    } else {
      worker = std::make_unique<RemoteWorker>(task, opened, &logger_);
    }
  }
  by_target_[target] = worker.get();
  return worker.get();
}

void WorkerCache::ReleaseWorker(const std::string& target, tensorflow::WorkerInterface* worker) {
  if (target == local_task_ || TaskOf(target) == local_task_) stock_->ReleaseWorker(local_task_, worker);
}

void WorkerCache::SetLogging(bool active) {
  logger_.SetLogging(active);
  stock_->SetLogging(active);
}

void WorkerCache::ClearLogs() {
  logger_.ClearLogs();
  stock_->ClearLogs();
}

bool WorkerCache::RetrieveLogs(int64_t step_id, tensorflow::StepStats* ss) {
  const bool ours = logger_.RetrieveLogs(step_id, ss);
  const bool stock = stock_->RetrieveLogs(step_id, ss);
  return ours || stock;
}

}  // namespace starwire
