#include "cc/worker/component_functions.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cc/base/guard.h"
#include "cc/base/private_members.h"
#include "tensorflow/core/common_runtime/eager/context.h"
#include "tensorflow/core/common_runtime/process_function_library_runtime.h"
#include "tensorflow/core/distributed_runtime/eager/cluster_function_library_runtime.h"

namespace starwire {

using tensorflow::eager::EagerClusterFunctionLibraryRuntime;
using tensorflow::eager::EagerServiceImpl;

namespace {

STARWIRE_REACH(FunctionContextsMuTag, EagerServiceImpl::contexts_mu_);
STARWIRE_REACH(FunctionContextsTag, EagerServiceImpl::contexts_);
STARWIRE_REACH(ClusterRuntimeTag, tensorflow::ProcessFunctionLibraryRuntime::parent_);
STARWIRE_REACH(FunctionsMuTag, EagerClusterFunctionLibraryRuntime::mu_);
STARWIRE_REACH(FunctionsTag, EagerClusterFunctionLibraryRuntime::function_data_);

// Of the address space, some 20 MB; memory is taken as entries are added. The graphs of so many functions take
// gigabytes.
constexpr size_t kRoom = 1 << 18;

struct Services {
  std::mutex mu;
  std::vector<EagerServiceImpl*> all;  // guarded by mu
};

Services* AllServices() {
  static auto* const services = new Services;
  return services;
}

// False: the service does not have the context.
bool Reserve(EagerServiceImpl* service, uint64_t context_id) {
  // TensorFlow destroys contexts under this lock, and waits for their steps, one of which may be here. Then the context
  // needs no room.
  const std::shared_lock<tensorflow::mutex> contexts_lock(service->*Reach(FunctionContextsMuTag()), std::try_to_lock);
  if (!contexts_lock.owns_lock()) return false;
  auto& contexts = service->*Reach(FunctionContextsTag());
  const auto context = contexts.find(context_id);
  if (context == contexts.end()) return false;
  // The service gives its contexts no runtime of another kind.
  auto* runtime =
      static_cast<EagerClusterFunctionLibraryRuntime*>(context->second->Context()->pflr()->*Reach(ClusterRuntimeTag()));
  if (runtime == nullptr) return true;
  const std::lock_guard<tensorflow::mutex> functions_lock(runtime->*Reach(FunctionsMuTag()));
  auto& functions = runtime->*Reach(FunctionsTag());
  if (functions.capacity() < kRoom) functions.reserve(kRoom);
  return true;
}

}  // namespace

void AddEagerService(EagerServiceImpl* service) {
  Services* services = AllServices();
  const std::lock_guard<std::mutex> lock(services->mu);
  if (service != nullptr) services->all.push_back(service);
}

void RemoveEagerService(EagerServiceImpl* service) {
  Services* services = AllServices();
  const std::lock_guard<std::mutex> lock(services->mu);
  services->all.erase(std::remove(services->all.begin(), services->all.end(), service), services->all.end());
}

void ReserveComponentFunctions(uint64_t context_id) {
  // There may be no memory for it. TensorFlow's callers know no exceptions.
  Perform("making room for component functions", [context_id] {
    Services* services = AllServices();
    const std::lock_guard<std::mutex> lock(services->mu);
    for (EagerServiceImpl* service : services->all) {
      if (Reserve(service, context_id)) return;
    }
  });
}

}  // namespace starwire
