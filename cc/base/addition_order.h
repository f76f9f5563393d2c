// AddN with three inputs or more adds in an order that depends on memory: it begins with the first input whose buffer
// it may take for the sum. TensorFlow does not let it take one for a sum that goes to another task, as what is sent has
// to lie where a network card can reach it. Here such a sum may go to an operation of ours instead.
#ifndef STARWIRE_CC_BASE_ADDITION_ORDER_H_
#define STARWIRE_CC_BASE_ADDITION_ORDER_H_

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Whether the bits of the node's result may depend on the order of its inputs.
bool HasOrder(const tensorflow::Node& node);

// A sum that is about to go to an operation of ours instead of another task takes the buffer of no input.
void PinSum(tensorflow::Node* node);

// The same for all sums of a placed graph that go to other tasks.
void PinSums(tensorflow::Graph* graph);

// Whether this node was pinned.
bool IsPinned(const tensorflow::Node& node);

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_ADDITION_ORDER_H_
