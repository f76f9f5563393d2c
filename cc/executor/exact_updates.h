// Counters that lose no count: `AssignAdd` and `AssignSub` of a reference variable hold the variable's lock.
//
//   return runtime->CreateKernel(WithExactUpdates(properties), kernel);
//
// An optimizer counts the global step with `use_locking=False`: load, add, store, with nothing in between that would
// keep another step's from happening at the same time. Our steps are short, and the calls of several workers often run
// on several threads at the same instant, so a count would be lost now and then. The same operations of resource
// variables always hold the lock. What updates by gradients is left as the graph says.
#ifndef STARWIRE_CC_EXECUTOR_EXACT_UPDATES_H_
#define STARWIRE_CC_EXECUTOR_EXACT_UPDATES_H_

#include <memory>

#include "tensorflow/core/framework/node_properties.h"

namespace starwire {

// `properties` itself, unless it is such an update without a lock.
std::shared_ptr<const tensorflow::NodeProperties> WithExactUpdates(
    const std::shared_ptr<const tensorflow::NodeProperties>& properties);

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_EXACT_UPDATES_H_
