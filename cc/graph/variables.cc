#include "cc/graph/variables.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "include/starwire.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::Edge;
using tensorflow::Node;

template <size_t N>
bool IsOneOf(const std::string& op, const char* const (&names)[N]) {
  return std::any_of(std::begin(names), std::end(names), [&op](const char* name) { return op == name; });
}

constexpr const char* kVariables[] = {"VariableV2", "Variable", "VarHandleOp"};

// The kernel belongs to the session and is found by the node's name, and so is what it holds. (Those with inputs, such
// as MutableDenseHashTableV2, are not copied: the planner sees to that.)
constexpr const char* kNamed[] = {
    "Const",
    "HashTable",
    "HashTableV2",
    "MutableHashTable",
    "MutableHashTableV2",
    "MutableHashTableOfTensors",
    "MutableHashTableOfTensorsV2",
    "FIFOQueue",
    "FIFOQueueV2",
    "PaddingFIFOQueue",
    "PaddingFIFOQueueV2",
    "PriorityQueue",
    "PriorityQueueV2",
    "RandomShuffleQueue",
    "RandomShuffleQueueV2",
    "ConditionalAccumulator",
    "SparseConditionalAccumulator",
    "ResourceConditionalAccumulator",
    "Barrier",
    "MutexV2",
    "IteratorV2",
};

// Of a variable's value alone. A table or a queue changes with every use.
constexpr const char* kReads[] = {"ReadVariableOp", "ResourceGather",     "ResourceGatherNd",
                                  "VariableShape",  "VarIsInitializedOp", "IsVariableInitialized"};

const Node* Source(const Node& node, int input) {
  const Edge* edge = nullptr;
  return node.input_edge(input, &edge).ok() ? edge->src() : nullptr;
}

bool IsRead(const Node& node) {
  if (IsOneOf(node.type_string(), kReads)) return true;
  if (node.type_string() != "Identity") return false;
  const Node* source = Source(node, 0);
  return source != nullptr && IsVariable(*source) && source->num_outputs() == 1 &&
         tensorflow::IsRefType(source->output_type(0));
}

bool ForwardsReference(const Node& node) {
  const tensorflow::OpDef& op = node.op_def();
  return op.input_arg_size() > 0 && op.output_arg_size() > 0 && op.input_arg(0).is_ref() && op.output_arg(0).is_ref() &&
         node.num_inputs() > 0 && node.num_outputs() > 0 && node.input_type(0) == node.output_type(0);
}

}  // namespace

bool IsVariable(const Node& node) { return IsOneOf(node.type_string(), kVariables); }

uint32_t VariableFlags(const Node& node) {
  uint32_t flags = 0;
  if (IsVariable(node) || IsOneOf(node.type_string(), kNamed)) flags |= SW_NODE_IS_CLONEABLE;
  if (ForwardsReference(node)) flags |= SW_NODE_FORWARDS_REF;
  if (IsRead(node)) flags |= SW_NODE_IS_READ;
  return flags;
}

}  // namespace starwire
