#include "cc/server/component_functions.h"

#include <cstddef>
#include <mutex>
#include <shared_mutex>

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

}  // namespace

void ReserveComponentFunctions(EagerServiceImpl* service, uint64_t context_id) {
  const std::shared_lock<tensorflow::mutex> contexts_lock(service->*Reach(FunctionContextsMuTag()));
  auto& contexts = service->*Reach(FunctionContextsTag());
  const auto context = contexts.find(context_id);
  if (context == contexts.end()) return;
  // The service gives its contexts no runtime of another kind.
  auto* runtime =
      static_cast<EagerClusterFunctionLibraryRuntime*>(context->second->Context()->pflr()->*Reach(ClusterRuntimeTag()));
  if (runtime == nullptr) return;
  const std::lock_guard<tensorflow::mutex> functions_lock(runtime->*Reach(FunctionsMuTag()));
  auto& functions = runtime->*Reach(FunctionsTag());
  if (functions.capacity() < kRoom) functions.reserve(kRoom);
}

}  // namespace starwire
