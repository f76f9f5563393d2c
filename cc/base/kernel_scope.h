// Kernels run on threads of TensorFlow's pools, which treat denormal numbers as zero and round to the nearest. Where a
// kernel runs on a thread of ours, a KernelScope gives it the same arithmetic.
#ifndef STARWIRE_CC_BASE_KERNEL_SCOPE_H_
#define STARWIRE_CC_BASE_KERNEL_SCOPE_H_

#include <cfenv>

#include "tensorflow/core/platform/denormal.h"
#include "tensorflow/core/platform/setround.h"

namespace starwire {

class KernelScope {
 public:
  KernelScope() = default;
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  tensorflow::port::ScopedFlushDenormal flush_;
  tensorflow::port::ScopedSetRound round_{FE_TONEAREST};
};

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_KERNEL_SCOPE_H_
