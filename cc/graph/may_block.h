// Which operations may wait for something that is no edge of their graph.
#ifndef STARWIRE_CC_GRAPH_MAY_BLOCK_H_
#define STARWIRE_CC_GRAPH_MAY_BLOCK_H_

#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Queues, accumulators, barriers, collectives, Python, functions (whatever is in them) and the like. What TensorFlow
// does not know is not among them: operations of other libraries count as computing.
bool MayBlock(const tensorflow::NodeDef& node);
inline bool MayBlock(const tensorflow::Node& node) { return MayBlock(node.def()); }

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_MAY_BLOCK_H_
