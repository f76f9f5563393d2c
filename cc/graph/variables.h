// What an operation is to the state that lives on its task: variables, tables, queues, and those who read them.
#ifndef STARWIRE_CC_GRAPH_VARIABLES_H_
#define STARWIRE_CC_GRAPH_VARIABLES_H_

#include <cstdint>

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// SW_NODE_IS_CLONEABLE, SW_NODE_FORWARDS_REF and SW_NODE_IS_READ together. What is not known has none of them, which is
// always safe: such a node is run once, and only where it can be reached.
uint32_t VariableFlags(const tensorflow::Node& node);

// Whether the node is a variable, rather than a constant or something else that is found by its name.
bool IsVariable(const tensorflow::Node& node);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_VARIABLES_H_
