#include "cc/graph/operations.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "cc/base/compat_executor.h"
#include "cc/base/status_codec.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::Edge;
using tensorflow::Node;
using tensorflow::OpDef;

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

template <typename Args>
bool HasReference(const Args& args) {
  return std::any_of(args.begin(), args.end(), [](const auto& arg) { return arg.is_ref(); });
}

template <typename Args>
bool HasHandle(const Args& args) {
  return std::any_of(args.begin(), args.end(), [](const auto& arg) { return arg.type() == tensorflow::DT_RESOURCE; });
}

bool CallsFunctions(const OpDef& op) {
  return std::any_of(op.attr().begin(), op.attr().end(),
                     [](const auto& attr) { return attr.type() == "func" || attr.type() == "list(func)"; });
}

// NULL: its library has not been loaded yet.
const OpDef* Registered(const std::string& name) {
  const OpDef* op = nullptr;
  return tensorflow::OpRegistry::Global()->LookUpOpDef(name, &op).ok() ? op : nullptr;
}

// FILE:LINE of an added operation.
std::string PlaceOf(const std::string& name) {
  sw_bytes place = {};
  for (size_t at = 0;; ++at) {
    const std::string added = AsString(sw_op_added(at, &place));
    if (added == name || added.empty()) return AsString(place);
  }
}

// Whether an added operation is as TensorFlow's registry has it. One that is not counts as unknown.
bool IsConfirmed(const std::string& name, uint32_t known) {
  const OpDef* op = Registered(name);
  if (op == nullptr) return false;
  static std::mutex mutex;
  static auto* const confirmed = new std::unordered_map<std::string, bool>();
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = confirmed->find(name);
  if (found != confirmed->end()) return found->second;
  const std::string contradiction = ContradictionOf(*op, known);
  if (!contradiction.empty()) {
    LOG(ERROR) << "starwire: STARWIRE_OPS: " << PlaceOf(name) << ": " << name
               << " counts as unknown: " << contradiction;
  }
  return (*confirmed)[name] = contradiction.empty();
}

// The node's types must confirm the table: output 0 is the reference of input 0.
bool ForwardsReference(const Node& node, uint32_t known) {
  if ((known & SW_OP_FORWARDS) == 0 || node.num_inputs() == 0 || node.num_outputs() == 0) return false;
  return tensorflow::IsRefType(node.input_type(0)) && node.input_type(0) == node.output_type(0);
}

}  // namespace

std::string ContradictionOf(const OpDef& op, uint32_t known) {
  const bool keeps_state = (known & SW_OP_IS_SHAREABLE) == 0;
  const uint32_t uses = known & (SW_OP_READS | SW_OP_UPDATES | SW_OP_FORWARDS);
  if ((known & SW_OP_IS_PURE) != 0) {
    if (op.is_stateful()) return "TensorFlow has it as stateful, so it is not pure";
    if (IsCommunication(op)) return "it communicates, so it is not pure";
    if (CallsFunctions(op)) return "it calls functions, so it is not pure";
  }
  if (uses == 0 && !keeps_state && (HasReference(op.input_arg()) || HasHandle(op.input_arg()))) {
    return "it takes a variable or another object: it reads or updates it, or keeps state for the session";
  }
  if ((known & SW_OP_IS_PURE) != 0 && (HasReference(op.output_arg()) || HasHandle(op.output_arg()))) {
    return "it returns a variable or another object, so it is not pure";
  }
  if ((known & (SW_OP_READS | SW_OP_UPDATES)) != 0) {
    if (op.input_arg_size() == 0 || !(op.input_arg(0).is_ref() || op.input_arg(0).type() == tensorflow::DT_RESOURCE)) {
      return "its first input is no variable";
    }
    if ((known & SW_OP_READS) != 0 && HasReference(op.output_arg())) return "what only reads returns no reference";
  }
  if ((known & SW_OP_FORWARDS) != 0) {
    const bool passes = op.input_arg_size() > 0 && op.input_arg(0).is_ref() && op.output_arg_size() == 1;
    if (!passes || !op.output_arg(0).is_ref()) return "its first input and its only output must be references";
  }
  if ((known & SW_OP_IS_NAMED) != 0 && (op.input_arg_size() != 0 || op.output_arg_size() != 1)) {
    return "what is found by its name has no input and one output";
  }
  if ((known & SW_OP_IS_LINEAR) != 0) {
    const auto constants = static_cast<int>(known >> SW_OP_CONSTANTS_SHIFT);
    if (op.input_arg_size() < constants) return "it has fewer inputs than must be constants";
    for (int i = op.input_arg_size() - constants; i < op.input_arg_size(); ++i) {
      const auto& input = op.input_arg(i);
      if (!input.number_attr().empty() || !input.type_list_attr().empty()) {
        return "its input " + input.name() + ", which must be a constant, is a list";
      }
    }
  }
  return std::string();
}

Status LoadOperations() {
  static const Status* const status = new Status([] {
    size_t n = 0;
    ErrorHandle error;
    const sw_code code = sw_ops_load(&n, Into(&error));
    if (code != 0) return StatusFromError(code, error);
    for (size_t at = 0; at < n; ++at) {
      sw_bytes place = {};
      const std::string name = AsString(sw_op_added(at, &place));
      const OpDef* op = Registered(name);
      const std::string contradiction = op == nullptr ? "" : ContradictionOf(*op, sw_op_knowledge(AsBytes(name)));
      if (!contradiction.empty()) {
        return MakeStatus(kInvalidArgument, "STARWIRE_OPS: " + AsString(place) + ": " + name + ": " + contradiction);
      }
    }
    return OkStatus();
  }());
  return *status;
}

uint32_t KnowledgeOf(const std::string& op) {
  const uint32_t known = sw_op_knowledge(AsBytes(op));
  if ((known & SW_OP_IS_ADDED) == 0) return known;
  return IsConfirmed(op, known) ? known : 0;
}

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
  // An empty container is the one that has the name of the device's job.
  tensorflow::DeviceNameUtils::ParsedName device;
  std::string container = TextOf(node, "container");
  if (container.empty() && tensorflow::DeviceNameUtils::ParseFullName(node.assigned_device_name(), &device)) {
    container = device.job;
  }
  return container + '\0' + (is_handle ? "handle" : "reference") + '\0' + name;
}

}  // namespace starwire
