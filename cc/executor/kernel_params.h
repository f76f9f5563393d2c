// How the kernels of a graph are made and who owns them, for both executors.
#ifndef STARWIRE_CC_EXECUTOR_KERNEL_PARAMS_H_
#define STARWIRE_CC_EXECUTOR_KERNEL_PARAMS_H_

#include <string>

#include "cc/base/compat_executor.h"
#include "tensorflow/core/framework/function.h"

namespace starwire {

enum class KernelOwner {
  kSession,   // of stateful kernels: the session, which keeps them by name, as for TensorFlow's own graphs
  kSubgraph,  // the graph that they are made for
};

// For a graph on the runtime's device.
tensorflow::LocalExecutorParams KernelParams(tensorflow::FunctionLibraryRuntime* runtime, const std::string& session,
                                             KernelOwner owner);

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_KERNEL_PARAMS_H_
