// The route from a device of another task to one of ours, looked up once per step instead of once per tensor.
#ifndef STARWIRE_CC_RENDEZVOUS_ROUTE_H_
#define STARWIRE_CC_RENDEZVOUS_ROUTE_H_

#include <memory>
#include <string>

#include "cc/base/channel.h"
#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/distributed_runtime/worker_cache_logger.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"

namespace starwire {

class RemoteWorker;

class Route {
 public:
  // Fails if the source is neither a task of the session's cluster that speaks starwire nor one that has joined, or the
  // destination is not a device of ours.
  static Status Make(tensorflow::WorkerSession* session, const tensorflow::Rendezvous::ParsedKey& key,
                     std::unique_ptr<Route>* out);
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;

  bool Leads(const tensorflow::Rendezvous::ParsedKey& key) const {
    return key.src_device == src_device_ && key.dst_device == dst_device_;
  }
  // A session of TensorFlow's eager runtime may get another cluster, and with it another worker cache, at any time.
  bool BelongsTo(const tensorflow::WorkerCacheInterface* cache) const {
    return cache_ == cache && !(is_shared_ && shared_.expired());
  }

  const std::string& task() const { return task_; }
  sw_channel* channel() const { return channel_->handle(); }
  tensorflow::Device* destination() const { return destination_; }
  // Whether tensors with these attributes are in host memory at the destination.
  bool OnHost(const tensorflow::AllocatorAttributes& attributes) const {
    return destination_is_host_ || attributes.on_host();
  }
  // Records transfers; null unless a timeline of this step was requested.
  tensorflow::WorkerCacheLogger* logger() const { return logger_; }

  // Links the list of a rendezvous's routes.
  Route* next = nullptr;

 private:
  Route() = default;

  std::string src_device_;
  std::string dst_device_;
  std::string task_;
  const tensorflow::WorkerCacheInterface* cache_ = nullptr;
  // With it, the address is not that of a later cache. A route lives as long as its rendezvous, that of an eager
  // context as long as the context: it must not keep each cluster's cache. TensorFlow 1.15 does not share caches.
  std::weak_ptr<tensorflow::WorkerCacheInterface> shared_;
  bool is_shared_ = false;
  std::shared_ptr<Channel> channel_;
  tensorflow::Device* destination_ = nullptr;
  bool destination_is_host_ = true;
  tensorflow::WorkerCacheLogger* logger_ = nullptr;
  std::shared_ptr<tensorflow::WorkerCacheInterface> owner_of_logger_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_ROUTE_H_
