#include "cc/rendezvous/route.h"

#include "cc/base/compat_session.h"
#include "cc/worker/remote_worker.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

Status Route::Make(tensorflow::WorkerSession* session, const tensorflow::Rendezvous::ParsedKey& key,
                   std::unique_ptr<Route>* out) {
  if (session == nullptr) {
    return MakeStatus(kInternal, "a tensor was requested before its step was set up: " + std::string(key.FullKey()));
  }
  const std::string own = WorkerNameOf(*session);
  if (key.dst_device.compare(0, own.size(), own) != 0) {
    return MakeStatus(kInvalidArgument,
                      "the destination of " + std::string(key.FullKey()) + " is not a device of " + own);
  }
  std::unique_ptr<Route> route(new Route);
  route->src_device_ = std::string(key.src_device);
  route->dst_device_ = std::string(key.dst_device);
  std::string device;
  if (!tensorflow::DeviceNameUtils::SplitDeviceName(route->src_device_, &route->task_, &device)) {
    return MakeStatus(kInternal, "not a full device name: " + route->src_device_);
  }
  Status status = session->device_mgr()->LookupDevice(route->dst_device_, &route->destination_);
  if (!status.ok()) return status;
  route->destination_is_host_ = route->destination_->device_type() == tensorflow::DEVICE_CPU;

  const auto cache = SharedWorkerCacheOf(*session);
  route->cache_ = cache.get();
  route->shared_ = cache;
  route->is_shared_ = cache.use_count() > 0;
  tensorflow::WorkerInterface* worker = cache->GetOrCreateWorker(route->task_);
  if (worker == nullptr) {
    return MakeStatus(kInternal, "unknown task " + route->task_ + ": it is not in the cluster that " + own +
                                     " knows, and has not joined (STARWIRE_JOIN)");
  }
  auto* remote = dynamic_cast<RemoteWorker*>(worker);
  if (remote == nullptr) {
    cache->ReleaseWorker(route->task_, worker);
    return MakeStatus(kFailedPrecondition, route->task_ + " is not reached over starwire");
  }
  if (!remote->status().ok()) return remote->status();
  route->channel_ = remote->shared_channel();
  tensorflow::WorkerCacheLogger* logger = remote->logger();
  if (logger != nullptr && logger->LoggingActive()) {
    route->logger_ = logger;
    route->owner_of_logger_ = cache;
  }
  *out = std::move(route);
  return OkStatus();
}

}  // namespace starwire
