#include "cc/star/kernel_state.h"

#include <string>
#include <unordered_set>

#include "absl/strings/match.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"

namespace starwire {

using tensorflow::GraphDef;
using tensorflow::NodeDef;

namespace {

// Operations that TensorFlow calls stateful because of what they do to something else, and whose kernels remember
// nothing. Anything that is not here is a session's own, which is what TensorFlow does.
constexpr const char* kNamedState[] = {
    "VarHandleOp",
    "Variable",
    "VariableV2",
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "VarIsInitializedOp",
    "IsVariableInitialized",
    "VariableShape",
    "DestroyResourceOp",
    "ResourceStridedSliceAssign",
    "ResourceCountUpTo",
    "Assert",
    "Save",
    "SaveSlices",
    "SaveV2",
    "Restore",
    "RestoreSlice",
    "RestoreV2",
    "MergeV2Checkpoints",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "Case",
    "While",
    "_Arg",
    "_Retval",
};
constexpr const char* kNamedStatePrefixes[] = {"ResourceApply", "ResourceSparseApply", "ResourceGather",
                                               "ResourceScatter"};

bool StateIsNamed(const std::string& op) {
  for (const char* name : kNamedState) {
    if (op == name) return true;
  }
  for (const char* prefix : kNamedStatePrefixes) {
    if (absl::StartsWith(op, prefix)) return true;
  }
  return false;
}

std::unordered_set<std::string> FunctionNames(const GraphDef& graph) {
  std::unordered_set<std::string> names;
  for (const auto& function : graph.library().function()) names.insert(function.signature().name());
  return names;
}

bool HasState(const NodeDef& node, const std::unordered_set<std::string>& functions) {
  if (StateIsNamed(node.op()) || functions.count(node.op()) != 0) return false;
  const tensorflow::OpDef* definition = nullptr;
  // What nobody knows fails when it is compiled.
  return tensorflow::OpRegistry::Global()->LookUpOpDef(node.op(), &definition).ok() && definition->is_stateful();
}

}  // namespace

bool HasKernelState(const GraphDef& graph) {
  const std::unordered_set<std::string> functions = FunctionNames(graph);
  for (const NodeDef& node : graph.node()) {
    if (HasState(node, functions)) return true;
  }
  for (const auto& function : graph.library().function()) {
    for (const NodeDef& node : function.node_def()) {
      if (HasState(node, functions)) return true;
    }
  }
  return false;
}

bool CallsFunctions(const GraphDef& graph) {
  const std::unordered_set<std::string> functions = FunctionNames(graph);
  for (const NodeDef& node : graph.node()) {
    if (functions.count(node.op()) != 0) return true;
    for (const auto& attribute : node.attr()) {
      if (attribute.second.has_func() || attribute.second.list().func_size() > 0) return true;
    }
  }
  return false;
}

}  // namespace starwire
