// tensor_fuse: rewrites a session's graphs so that tensors which cross between tasks together travel as one.
#ifndef STARWIRE_CC_FUSE_PASS_H_
#define STARWIRE_CC_FUSE_PASS_H_

#include "cc/base/compat.h"
#include "tensorflow/core/common_runtime/device_set.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// The result for one graph.
struct FuseResult {
  size_t crossings = 0;  // tensors and control tokens that cross between tasks: the messages without fusion
  size_t fused = 0;      // how many of them travel with others
  size_t groups = 0;     // in how many messages
  size_t Messages() const { return crossings - fused + groups; }
};

// Fuses tensors where it pays, in a graph that is placed and not yet partitioned. `devices` may be null. If this fails,
// the graph still has its original meaning.
Status FuseGraph(tensorflow::Graph* graph, const tensorflow::DeviceSet* devices, FuseResult* result);

// Registers the pass with TensorFlow, for the graphs of sessions that enable it (cc/fuse/switch.h).
void RegisterFusePass();

}  // namespace starwire

#endif  // STARWIRE_CC_FUSE_PASS_H_
