// tensor_fuse: rewrites a session's graphs so that tensors which cross between tasks together travel as one.
#ifndef STARWIRE_CC_FUSE_PASS_H_
#define STARWIRE_CC_FUSE_PASS_H_

#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/device_set.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// What became of one graph.
struct FuseResult {
  size_t crossings = 0;  // tensors and control tokens that cross between tasks: the messages without fusion
  size_t fused = 0;      // those of them that travel with others
  size_t groups = 0;     // in so many messages
  size_t Messages() const { return crossings - fused + groups; }
};

// Fuses what is worth it in a graph that is placed and not yet partitioned. `devices` may be null. The graph means
// what it did if this fails.
Status FuseGraph(tensorflow::Graph* graph, const tensorflow::DeviceSet* devices, const sw_fuse_limits& limits,
                 FuseResult* result);

// Makes TensorFlow apply it to the graphs of sessions that want it (cc/fuse/switch.h).
void RegisterFusePass();

}  // namespace starwire

#endif  // STARWIRE_CC_FUSE_PASS_H_
