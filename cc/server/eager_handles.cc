#include "cc/server/eager_handles.h"

#include <memory>
#include <shared_mutex>

#include "cc/base/private_members.h"
#include "tensorflow/core/common_runtime/eager/context.h"
#include "tensorflow/core/common_runtime/eager/tensor_handle.h"
#include "tensorflow/core/distributed_runtime/eager/remote_mgr.h"
#include "tensorflow/core/distributed_runtime/eager/remote_tensor_handle.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {

using tensorflow::TensorHandle;
using tensorflow::eager::EagerServiceImpl;
using tensorflow::eager::RemoteMgr;

namespace {

STARWIRE_REACH(ContextsMuTag, EagerServiceImpl::contexts_mu_);
STARWIRE_REACH(ContextsTag, EagerServiceImpl::contexts_);
// RemoteMgr::GetTensorHandle() returns the map's own reference, which a concurrent deletion may be the last to drop.
STARWIRE_REACH(HandlesMuTag, RemoteMgr::remote_tensor_handle_mu_);
STARWIRE_REACH(HandlesTag, RemoteMgr::remote_tensor_handle_map_);
STARWIRE_REACH(IsReadyTag, TensorHandle::IsReady);

struct Release {
  void operator()(TensorHandle* handle) const { handle->Unref(); }
};
using HeldTensor = std::unique_ptr<TensorHandle, Release>;

std::string TextOf(const std::pair<int64_t, int32_t>& name) {
  return "Op ID: " + std::to_string(name.first) + ", Output num: " + std::to_string(name.second);
}

using SharedLock = std::shared_lock<tensorflow::mutex>;

// TensorFlow destroys contexts under these locks, which takes as long as their operations.
SharedLock Lock(tensorflow::mutex& mu, bool may_wait) {  // NOLINT: as std::shared_lock takes it
  return may_wait ? SharedLock(mu) : SharedLock(mu, std::try_to_lock);
}

Status Collect(RemoteMgr* manager, const std::vector<std::pair<int64_t, int32_t>>& names, bool may_wait,
               bool* would_wait, std::vector<HeldTensor>* handles) {
  const SharedLock lock = Lock(manager->*Reach(HandlesMuTag()), may_wait);
  *would_wait = !lock.owns_lock();
  if (*would_wait) return OkStatus();
  auto& all = manager->*Reach(HandlesTag());
  for (const auto& name : names) {
    auto found = all.find(tensorflow::eager::RemoteTensorHandleInternal(name.first, name.second));
    if (found == all.end()) {
      // ClusterCoordinator recognises a restarted parameter server by this sentence of TensorFlow's.
      return MakeStatus(kInvalidArgument, "Unable to find the relevant tensor remote_handle: " + TextOf(name));
    }
    found->second->Ref();
    handles->emplace_back(found->second);
  }
  return OkStatus();
}

}  // namespace

Status EagerHandles::Find(uint64_t context_id, const std::vector<std::pair<int64_t, int32_t>>& names, bool may_wait,
                          bool* would_wait, std::vector<tensorflow::Tensor>* handles) {
  *would_wait = false;
  std::vector<HeldTensor> found;
  found.reserve(names.size());
  {
    // Held, so that the context is not destroyed here, which waits for its operations.
    const SharedLock lock = Lock(service_->*Reach(ContextsMuTag()), may_wait);
    *would_wait = !lock.owns_lock();
    if (*would_wait) return OkStatus();
    auto& contexts = service_->*Reach(ContextsTag());
    const auto context = contexts.find(context_id);
    if (context == contexts.end()) {
      // TensorFlow's words, by which programs recognise a restarted task.
      return MakeStatus(kAborted, "starwire: Unable to find a context_id " + std::to_string(context_id) +
                                      ": the task was restarted, or the context was closed");
    }
    context->second->RecordAccess();
    // A pointer, or the owner of one.
    const Status status = Collect(&*context->second->Context()->RemoteMgr(), names, may_wait, would_wait, &found);
    if (!status.ok() || *would_wait) return status;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    const TensorHandle& handle = *found[i];
    const tensorflow::Device* device = handle.resource_device();
    if (handle.Type() != TensorHandle::LOCAL || handle.dtype != tensorflow::DT_RESOURCE ||
        (device != nullptr && device->name() != device_)) {
      return MakeStatus(kUnimplemented, "starwire: a function was given a handle (" + TextOf(names[i]) +
                                            ") that is not of a resource of " + device_ +
                                            ": configure the servers of the workers with starwire.config(star=False)");
    }
    if (!may_wait && !(handle.*Reach(IsReadyTag()))()) {
      *would_wait = true;
      return OkStatus();
    }
  }
  for (const HeldTensor& handle : found) {
    const tensorflow::Tensor* tensor = nullptr;
    const Status status = handle->Tensor(&tensor);
    if (!status.ok()) {
      handles->clear();
      return status;
    }
    handles->push_back(*tensor);
  }
  return OkStatus();
}

}  // namespace starwire
