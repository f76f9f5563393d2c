// The op table (crates/planner/src/ops.txt), for TensorFlow's nodes.
#ifndef STARWIRE_CC_GRAPH_OPERATIONS_H_
#define STARWIRE_CC_GRAPH_OPERATIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Reads STARWIRE_OPS, once per process. An error names the file and line.
Status LoadOperations();

// How TensorFlow's registry contradicts these SW_OP_… flags; empty if it does not.
std::string ContradictionOf(const tensorflow::OpDef& op, uint32_t known);

// SW_OP_… flags; 0 for an operation that is not in the table: nothing may be assumed about it.
uint32_t KnowledgeOf(const std::string& op);

// Whether the node calls a function of the graph's library. The function itself is not examined.
bool HasFunctions(const tensorflow::NodeDef& node);

// Whether the node takes time and memory linear in its inputs and outputs, whose dimensions follow from those of its
// inputs. `is_constant`: of the node with this name.
bool IsLinear(const tensorflow::NodeDef& node, const std::function<bool(const std::string& name)>& is_constant);

// Whether the node is a variable, rather than a constant or something else that is found by name.
bool IsVariable(const tensorflow::Node& node);

// Whether the node is a resource handle that a function is given: a variable or another object on the node's device,
// which is the same wherever the argument is copied to. Two of them may be the same object.
bool IsCaptured(const tensorflow::Node& node);

// The node's SW_NODE_IS_… flags for the planners.
uint32_t NodeFlags(const tensorflow::Node& node);

// Variables of one device with equal texts are the same variable.
std::string VariableName(const tensorflow::Node& node);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_OPERATIONS_H_
