// AddN with three inputs or more adds in an order that depends on memory: it begins with the first input whose buffer
// it may take for the sum. TensorFlow does not let it take one for a sum that goes to another task, as what is sent has
// to lie where a network card can reach it. Here such a sum may go to an operation of ours instead.
#ifndef STARWIRE_CC_BASE_ADDITION_ORDER_H_
#define STARWIRE_CC_BASE_ADDITION_ORDER_H_

#include <vector>

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Whether the bits of the node's result may depend on the order of its inputs.
bool HasOrder(const tensorflow::Node& node);

// Whether the node's value goes to another task by an edge of the graph: TensorFlow will send it.
bool IsSent(const tensorflow::Node& node);

// The sums of a placed graph that go to other tasks.
std::vector<tensorflow::Node*> SentSums(const tensorflow::Graph& graph);

// Has a sum that goes to an operation of ours instead of another task take the buffer of no input.
void PinSum(tensorflow::Node* node);

// Whether this node was pinned.
bool IsPinned(const tensorflow::Node& node);

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_ADDITION_ORDER_H_
