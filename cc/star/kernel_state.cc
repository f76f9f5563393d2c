#include "cc/star/kernel_state.h"

#include <string>
#include <unordered_set>

#include "cc/graph/operations.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"

namespace starwire {

using tensorflow::GraphDef;
using tensorflow::NodeDef;

namespace {

std::unordered_set<std::string> FunctionNames(const GraphDef& graph) {
  std::unordered_set<std::string> names;
  for (const auto& function : graph.library().function()) names.insert(function.signature().name());
  return names;
}

bool HasState(const NodeDef& node, const std::unordered_set<std::string>& functions) {
  if (functions.count(node.op()) != 0) return false;
  return (KnowledgeOf(node.op()) & SW_OP_IS_SHAREABLE) == 0;
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
    if (HasFunctions(node)) return true;
  }
  return false;
}

}  // namespace starwire
