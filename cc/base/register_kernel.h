// Registers kernels when the library is used, not when it is loaded as TensorFlow's macros do.
#ifndef STARWIRE_CC_BASE_REGISTER_KERNEL_H_
#define STARWIRE_CC_BASE_REGISTER_KERNEL_H_

#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace starwire {

// `builder` has the op and its types; `name` is the kernel's, for TensorFlow's messages.
template <typename Kernel>
void RegisterCpuKernel(tensorflow::KernelDefBuilder* builder, const char* name) {
  const tensorflow::KernelDef* def = builder->Device(tensorflow::DEVICE_CPU).Build();
  // The constructor registers the kernel, and owns `def`.
  tensorflow::kernel_factory::OpKernelRegistrar(
      def, name,
      [](tensorflow::OpKernelConstruction* context) -> tensorflow::OpKernel* { return new Kernel(context); });
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_REGISTER_KERNEL_H_
