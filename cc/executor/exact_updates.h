// Exact counters: `AssignAdd` and `AssignSub` of a reference variable hold the variable's lock.
//
//   return runtime->CreateKernel(WithExactUpdates(source), kernel);
//
// An optimizer increments the global step with `use_locking=False`: load, add, store, with nothing to keep another step
// from doing the same in between. Our steps are short, and the calls of several workers often run on several threads at
// the same instant, so increments would occasionally be lost. The same operations on resource variables always hold the
// lock. Gradient updates are left as the graph has them.
#ifndef STARWIRE_CC_EXECUTOR_EXACT_UPDATES_H_
#define STARWIRE_CC_EXECUTOR_EXACT_UPDATES_H_

#include "cc/base/compat_executor.h"

namespace starwire {

// Returns `source` itself unless it is such an update without a lock.
KernelSource WithExactUpdates(const KernelSource& source);

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_EXACT_UPDATES_H_
