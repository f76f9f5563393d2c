#include "cc/server/arena_devices.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cc/base/compat_server.h"
#include "cc/tensor/arena_allocator.h"
#include "cc/worker/worker_cache.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/threadpool_device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/public/session_options.h"

namespace starwire {

using tensorflow::Device;

Status MakeArenaDevices(const std::string& protocol, const tensorflow::ServerDef& def,
                        std::unique_ptr<tensorflow::DeviceMgr>* out) {
  const std::string task = TaskName(def.job_name(), def.task_index());
  // TensorFlow refuses a task that is not in its cluster, but only if there are no devices yet.
  if (AddressesOf(def.cluster()).count(task) == 0 || ReplicaOf(def) != 0) return OkStatus();
  ArenaAllocator* arena = ArenaAllocator::ForProtocol(protocol, tensorflow::cpu_allocator());
  if (arena == nullptr) return OkStatus();
  tensorflow::SessionOptions options;
  options.config = def.default_session_config();
  std::vector<std::unique_ptr<Device>> devices;
  Status status = tensorflow::DeviceFactory::AddDevices(options, task, &devices);
  if (!status.ok()) return status;
  const bool only_cpus = std::all_of(devices.begin(), devices.end(), [](const std::unique_ptr<Device>& device) {
    return device->device_type() == tensorflow::DEVICE_CPU;
  });
  for (auto& device : devices) {
    if (!only_cpus) break;
    const std::string name = device->name();
    const auto limit = tensorflow::Bytes(device->attributes().memory_limit());
    const tensorflow::DeviceLocality locality = device->attributes().locality();
    device = std::make_unique<tensorflow::ThreadPoolDevice>(options, name, limit, locality, arena);
  }
  *out = std::make_unique<OwnDeviceMgr>(std::move(devices));
  return OkStatus();
}

}  // namespace starwire
