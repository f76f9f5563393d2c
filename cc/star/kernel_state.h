// Whether the kernels of a plan can be shared.
#ifndef STARWIRE_CC_STAR_KERNEL_STATE_H_
#define STARWIRE_CC_STAR_KERNEL_STATE_H_

#include "tensorflow/core/framework/graph.pb.h"

namespace starwire {

// Whether some kernel of this graph has state that belongs to a session: random generators, iterators, tables, queues,
// and everything else that TensorFlow calls stateful. Variables and the operations on them do not count: their state is
// in the device's resource manager, where every kernel finds it by name. Functions count with their contents.
bool HasKernelState(const tensorflow::GraphDef& graph);

// Whether some node calls a function.
bool CallsFunctions(const tensorflow::GraphDef& graph);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_KERNEL_STATE_H_
