#include "cc/graph/operations.h"

#include "cc/base/status_codec.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::Edge;
using tensorflow::Node;

// A handle with this name is created anew each time: a copy of the node would be another variable.
constexpr char kAnonymous[] = "cd2c89b7-88b7-44c8-ad83-06c2a9158347";

std::string TextOf(const Node& node, const char* attribute) {
  std::string text;
  tensorflow::TryGetNodeAttr(node.attrs(), attribute, &text);
  return text;
}

// TensorFlow 1 reads a reference variable with an Identity beside it.
bool ReadsReference(const Node& node) {
  if (node.type_string() != "Identity") return false;
  const Edge* edge = nullptr;
  if (!node.input_edge(0, &edge).ok()) return false;
  const Node* source = edge->src();
  return IsVariable(*source) && source->num_outputs() == 1 && tensorflow::IsRefType(source->output_type(0));
}

// The node's types must confirm the table: output 0 is the reference of input 0.
bool ForwardsReference(const Node& node, uint32_t known) {
  if ((known & SW_OP_FORWARDS) == 0 || node.num_inputs() == 0 || node.num_outputs() == 0) return false;
  return tensorflow::IsRefType(node.input_type(0)) && node.input_type(0) == node.output_type(0);
}

}  // namespace

uint32_t KnowledgeOf(const std::string& op) { return sw_op_knowledge(AsBytes(op)); }

bool HasFunctions(const tensorflow::NodeDef& node) {
  for (const auto& attribute : node.attr()) {
    if (attribute.second.has_func() || attribute.second.list().func_size() > 0) return true;
  }
  return false;
}

bool IsLinear(const tensorflow::NodeDef& node, const std::function<bool(const std::string& name)>& is_constant) {
  const uint32_t known = KnowledgeOf(node.op());
  if ((known & SW_OP_IS_LINEAR) == 0 || HasFunctions(node)) return false;
  uint32_t constants = known >> SW_OP_CONSTANTS_SHIFT;
  for (auto input = node.input().rbegin(); input != node.input().rend() && constants > 0; ++input) {
    if (!input->empty() && input->front() == '^') continue;
    if (!is_constant(input->substr(0, input->find(':')))) return false;
    --constants;
  }
  return constants == 0;
}

bool IsVariable(const Node& node) { return (KnowledgeOf(node.type_string()) & SW_OP_IS_VARIABLE) != 0; }

bool IsCaptured(const Node& node) { return node.IsArg() && node.output_type(0) == tensorflow::DT_RESOURCE; }

uint32_t NodeFlags(const Node& node) {
  const uint32_t known = KnowledgeOf(node.type_string());
  if (known == 0) return SW_NODE_IS_UNKNOWN | SW_NODE_IS_STATEFUL | SW_NODE_IS_BLOCKING;
  uint32_t flags = 0;
  if ((known & SW_OP_IS_PURE) == 0 || HasFunctions(node.def())) flags |= SW_NODE_IS_STATEFUL;
  if ((known & SW_OP_WAITS) != 0 || HasFunctions(node.def())) flags |= SW_NODE_IS_BLOCKING;
  if ((known & SW_OP_IS_NAMED) != 0 && TextOf(node, "shared_name") != kAnonymous) flags |= SW_NODE_IS_CLONEABLE;
  if (IsCaptured(node)) flags |= SW_NODE_IS_CLONEABLE;
  if (ForwardsReference(node, known)) flags |= SW_NODE_FORWARDS_REF;
  if ((known & SW_OP_READS) != 0 || ReadsReference(node)) flags |= SW_NODE_IS_READ;
  return flags;
}

std::string VariableName(const Node& node) {
  const std::string shared = TextOf(node, "shared_name");
  // An old variable without a shared name uses its node's.
  const bool is_handle = node.output_type(0) == tensorflow::DT_RESOURCE;
  const std::string& name = shared.empty() && !is_handle ? node.name() : shared;
  return TextOf(node, "container") + '\0' + (is_handle ? "handle" : "reference") + '\0' + name;
}

}  // namespace starwire
