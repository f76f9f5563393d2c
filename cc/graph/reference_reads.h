// When a variable's value is taken that another task needs.
#ifndef STARWIRE_CC_GRAPH_REFERENCE_READS_H_
#define STARWIRE_CC_GRAPH_REFERENCE_READS_H_

#include "cc/base/compat.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// A reference that a node of another task takes the value of is followed after the node's control inputs: TensorFlow
// lets the receiving end wait for them, and what arrives is what the variable holds by then. Gives each such node an
// Identity beside the variable that says so, so that the edge between the tasks carries a value, whoever carries it. No
// reference crosses afterwards.
Status PinReferenceReads(tensorflow::Graph* graph);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_REFERENCE_READS_H_
