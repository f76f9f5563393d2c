// Fixes when a variable's value is read for another task.
#ifndef STARWIRE_CC_GRAPH_REFERENCE_READS_H_
#define STARWIRE_CC_GRAPH_REFERENCE_READS_H_

#include "cc/base/compat.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// When a node takes the value behind a reference of another task, the reference is dereferenced after the node's other
// inputs: TensorFlow makes the receiving end wait for them, and what arrives is the variable's value at that time. This
// gives each such node an Identity beside the variable that waits for the node's control inputs, and, if the graph
// changes the variable, for its values. So the edge between the tasks carries a value, whatever transports it. No
// reference crosses afterwards.
Status PinReferenceReads(tensorflow::Graph* graph);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_REFERENCE_READS_H_
