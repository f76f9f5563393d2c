// Kernels of ours for TensorFlow's operations. Each contains TensorFlow's kernel of the node, and leaves to it whatever
// is not an ordinary case: so there is nothing about errors that could differ.
#ifndef STARWIRE_CC_EXECUTOR_KERNEL_OVERRIDE_H_
#define STARWIRE_CC_EXECUTOR_KERNEL_OVERRIDE_H_

#include <algorithm>
#include <cstdint>
#include <memory>

#include "cc/base/compat_executor.h"
#include "cc/base/register_kernel.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace starwire {

class KernelOverride : public tensorflow::OpKernel {
 public:
  explicit KernelOverride(tensorflow::OpKernelConstruction* context);
  void Compute(tensorflow::OpKernelContext* context) final;

 protected:
  // Does the node's work, or returns false and has done nothing.
  virtual bool Handle(tensorflow::OpKernelContext* context) = 0;

  // In how many parts, each on a thread, the work on so many elements is done.
  static int64_t PartsFor(tensorflow::OpKernelContext* context, int64_t elements) {
    return std::min<int64_t>(Threads(context)->NumThreads(), elements / kElementsPerThread);
  }
  static tensorflow::thread::ThreadPool* Threads(tensorflow::OpKernelContext* context) {
    return context->device()->tensorflow_cpu_worker_threads()->workers;
  }

 private:
  // Below this many elements, waking another thread takes longer than the work.
  static constexpr int64_t kElementsPerThread = 1 << 15;

  std::unique_ptr<tensorflow::OpKernel> stock_;
};

// Whether STARWIRE_ROW_UPDATES allows them.
bool KernelOverridesAreOn();

// The type in an attribute of the node.
bool TypeOf(const tensorflow::NodeDef& node, const char* attribute, tensorflow::DataType* type);

// Gives the node the label that selects our kernel, whatever it is.
void SelectOverride(tensorflow::NodeDef* node);
bool SelectsOverride(const tensorflow::NodeDef& node);
KernelSource WithOverride(const KernelSource& source);

namespace kernel_override_internal {
extern const char kLabel[];
}  // namespace kernel_override_internal

// `builder` has the operation and its types.
template <typename Kernel>
void RegisterOverride(tensorflow::KernelDefBuilder* builder, const char* name) {
  builder->Label(kernel_override_internal::kLabel);
  RegisterCpuKernel<Kernel>(builder, name);
}

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_KERNEL_OVERRIDE_H_
