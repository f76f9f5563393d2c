// Whose the kernels of a plan can be.
#ifndef STARWIRE_CC_STAR_KERNEL_STATE_H_
#define STARWIRE_CC_STAR_KERNEL_STATE_H_

#include "tensorflow/core/framework/graph.pb.h"

namespace starwire {

// Whether some kernel of this graph carries a state that is a session's own: random generators, iterators, tables,
// queues, whatever TensorFlow calls stateful. Not so variables and what works on them: their state is in the device's
// resource manager, where every kernel of that name finds it. What functions contain counts.
bool HasKernelState(const tensorflow::GraphDef& graph);

// Whether some node calls a function.
bool CallsFunctions(const tensorflow::GraphDef& graph);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_KERNEL_STATE_H_
