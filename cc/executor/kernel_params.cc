#include "cc/executor/kernel_params.h"

#include "cc/executor/exact_updates.h"
#include "cc/executor/row_gathers.h"
#include "cc/executor/row_updates.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_segment.h"

namespace starwire {

using tensorflow::FunctionLibraryRuntime;
using tensorflow::OpKernel;
using tensorflow::OpSegment;

tensorflow::LocalExecutorParams KernelParams(FunctionLibraryRuntime* runtime, const std::string& session,
                                             KernelOwner owner) {
  tensorflow::Device* device = runtime->device();
  // As in TensorFlow's worker, except for inserted operations: their kernels have no state that another graph could
  // need, and keeping them by name would keep those of deleted graphs.
  const auto is_of_session = [runtime, owner](const std::string& op) {
    return owner == KernelOwner::kSession && op[0] != '_' && OpSegment::ShouldOwnKernel(runtime, op);
  };
  tensorflow::LocalExecutorParams params;
  params.device = device;
  params.function_library = runtime;
  params.create_kernel = [=](const KernelSource& source, OpKernel** kernel) {
    if (!is_of_session(DefOf(source).op())) {
      return runtime->CreateKernel(WithRowGathers(WithRowUpdates(WithExactUpdates(source), device)), kernel);
    }
    return device->op_segment()->FindOrCreate(
        session, DefOf(source).name(), kernel, [runtime, device, &source](OpKernel** made) {
          return runtime->CreateKernel(WithRowGathers(WithRowUpdates(source, device)), made);
        });
  };
  params.delete_kernel = [=](OpKernel* kernel) {
    if (kernel != nullptr && !is_of_session(kernel->type_string())) delete kernel;
  };
  return params;
}

}  // namespace starwire
