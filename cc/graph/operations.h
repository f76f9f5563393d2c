// What is known about operations: the table of crates/planner/src/ops.txt, as TensorFlow's nodes need it.
#ifndef STARWIRE_CC_GRAPH_OPERATIONS_H_
#define STARWIRE_CC_GRAPH_OPERATIONS_H_

#include <cstdint>
#include <string>

#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// SW_OP_… together; 0 for an operation that is not in the table, of which nothing may be assumed.
uint32_t KnowledgeOf(const std::string& op);

// Calls a function of the graph's library, whatever is in that.
bool HasFunctions(const tensorflow::NodeDef& node);

// May wait for something that is no edge of its graph.
bool MayWait(const tensorflow::NodeDef& node);

// Known to run to its end in the time that its arithmetic takes: fit for a thread that others wait for.
bool IsPrompt(const tensorflow::NodeDef& node);

// A variable, rather than a constant or something else that is found by its name.
bool IsVariable(const tensorflow::Node& node);

// What the planners should know about a node: SW_NODE_IS_… together.
uint32_t NodeFlags(const tensorflow::Node& node);

// Variables of one device with equal texts are the same variable.
std::string VariableName(const tensorflow::Node& node);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_OPERATIONS_H_
