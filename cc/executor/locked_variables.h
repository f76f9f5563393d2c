// The variables that a kernel updates in place, or gathers rows of, held as TensorFlow's kernels hold them.
#ifndef STARWIRE_CC_EXECUTOR_LOCKED_VARIABLES_H_
#define STARWIRE_CC_EXECUTOR_LOCKED_VARIABLES_H_

#include <array>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/lib/core/refcount.h"
#include "tensorflow/core/platform/mutex.h"

namespace starwire {

// The variables at the first inputs of a kernel, all of one kind.
class LockedVariables {
 public:
  static constexpr int kMost = 3;

  // Whether the first `count` inputs are variables that may be updated in place. They are held until this object is
  // destroyed. An exclusive hold keeps everybody else out. Any other hold of a resource variable keeps out assignments,
  // but not other sparse updates; of a reference variable, nobody.
  bool Hold(tensorflow::OpKernelContext* context, int count, bool exclusive);

  const tensorflow::Tensor& operator[](int number) const { return tensors_[static_cast<size_t>(number)]; }

  LockedVariables() = default;
  ~LockedVariables();
  LockedVariables(const LockedVariables&) = delete;
  LockedVariables& operator=(const LockedVariables&) = delete;

 private:
  using Mutexes = std::array<tensorflow::mutex*, kMost>;
  void Lock(Mutexes mutexes, bool exclusive);

  std::array<tensorflow::core::RefCountPtr<tensorflow::Var>, kMost> variables_;
  std::array<tensorflow::Tensor, kMost> tensors_;
  Mutexes locked_{};
  bool exclusive_ = false;
};

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_LOCKED_VARIABLES_H_
