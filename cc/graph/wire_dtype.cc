#include "cc/graph/wire_dtype.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/graph/names.h"
#include "cc/graph/operations.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::DeviceNameUtils;
using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

// A device type that does not exist, as in cc/star/switch.cc.
constexpr char kMark[] = "STARWIRE_WIRE_DTYPE";

const Node* InputOf(const Node& node, int number) {
  const Node* from = nullptr;
  return node.input_node(number, &from).ok() && from->IsOp() ? from : nullptr;
}

// Numbers such as a rate are not parameters.
bool IsArray(const Node& variable) {
  tensorflow::PartialTensorShape shape;
  const bool is_known = tensorflow::GetNodeAttr(variable.attrs(), "shape", &shape).ok();
  return is_known && (shape.unknown_rank() || shape.dims() > 0);
}

bool IsParameter(const Node* variable) { return variable != nullptr && IsVariable(*variable) && IsArray(*variable); }

// A variable as a whole.
bool IsRead(const Node& node) {
  return (node.type_string() == "ReadVariableOp" || node.type_string() == "Identity") && IsParameter(InputOf(node, 0));
}

// A variable, or rows of one.
bool IsParameters(const Node& node) {
  if (node.type_string() == "ResourceGather") return IsParameter(InputOf(node, 0));
  if (node.type_string() != "GatherV2") return IsRead(node);
  const Node* rows_of = InputOf(node, 0);
  return rows_of != nullptr && (IsParameter(rows_of) || IsRead(*rows_of));
}

// The name of the argument that an input belongs to.
std::string ArgumentOf(const Node& node, int input) {
  // Operations that apply gradients have no lists among their arguments.
  const auto& arguments = node.op_def().input_arg();
  return node.num_inputs() == arguments.size() && input < arguments.size() ? arguments[input].name() : "";
}

bool AppliesGradient(const Node& node, int input) {
  static const auto* const scatters =
      new std::set<std::string>{"ScatterAdd", "ScatterSub", "ResourceScatterAdd", "ResourceScatterSub"};
  const std::string& op = node.type_string();
  const std::string argument = ArgumentOf(node, input);
  if (scatters->count(op) > 0) return argument == "updates";
  const bool applies = op.compare(0, 5, "Apply") == 0 || op.compare(0, 11, "SparseApply") == 0 ||
                       op.compare(0, 13, "ResourceApply") == 0 || op.compare(0, 19, "ResourceSparseApply") == 0;
  return applies && (argument == "grad" || argument == "delta");
}

bool IsNumber(const Node* node) {
  tensorflow::Tensor value;
  return node != nullptr && node->type_string() == "Const" &&
         tensorflow::GetNodeAttr(node->attrs(), "value", &value).ok() && value.dims() == 0;
}

// Whether it is a gradient, or rows of one: what is added up, or multiplied by a rate, and then applied.
bool IsGradient(const Node& node, int input) {
  if (AppliesGradient(node, input)) return true;
  const std::string& op = node.type_string();
  const bool leads_on = (op == "UnsortedSegmentSum" && input == 0) || op == "Neg" ||
                        (op == "Mul" && IsNumber(InputOf(node, 1 - input)) && !IsNumber(InputOf(node, input)));
  if (!leads_on) return false;
  bool is_used = false;
  for (const Edge* edge : node.out_edges()) {
    if (edge->IsControlEdge()) continue;
    if (!IsGradient(*edge->dst(), edge->dst_input())) return false;
    is_used = true;
  }
  return is_used;
}

// Passes on a handle or reference of a variable.
bool PassesVariable(const Node& node) {
  static const auto* const operations =
      new std::set<std::string>{"Identity", "RefIdentity", "Switch", "RefSwitch", "Enter", "RefEnter"};
  return operations->count(node.type_string()) > 0;
}

// The node that makes the handle or reference that the node is or passes on.
const Node* OriginOf(const Node* node) {
  while (node != nullptr && PassesVariable(*node)) node = InputOf(*node, 0);
  return node;
}

bool IsHandle(DataType type) { return type == tensorflow::DT_RESOURCE || tensorflow::IsRefType(type); }

bool TakesHandle(const Node& node) {
  return std::any_of(node.input_types().begin(), node.input_types().end(), IsHandle);
}

// An object such as a queue. A handle that a function is given or that was chosen may be a variable's.
bool IsOtherObject(const Node* origin) {
  return origin != nullptr && !IsVariable(*origin) && !origin->IsArg() && !origin->IsRecv() &&
         !HasFunctions(origin->def()) && !TakesHandle(*origin);
}

// Changes no variable, or only by gradients.
bool KeepsVariables(const Node& node) {
  static const auto* const reads =
      new std::set<std::string>{"ReadVariableOp",     "ResourceGather", "ResourceGatherNd",
                                "VarIsInitializedOp", "VariableShape",  "IsVariableInitialized"};
  if (PassesVariable(node) || reads->count(node.type_string()) > 0) return true;
  for (int input = 0; input < node.num_inputs(); ++input) {
    if (AppliesGradient(node, input)) return true;
  }
  return false;
}

// Does arithmetic with a value: what comes of it is another one.
bool IsArithmetic(const Node& node) {
  static const auto* const operations = [] {
    std::istringstream words(
        "Add AddN AddV2 BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd Conv1D Conv2D Conv3D Cos Cosh "
        "DepthwiseConv2dNative Div DivNoNan Einsum Elu Erf Exp Expm1 FusedBatchNorm FusedBatchNormV2 "
        "FusedBatchNormV3 L2Loss LeakyRelu Log Log1p LogSoftmax MatMul Mean Mul MulNoNan Pow Prod RealDiv "
        "Rsqrt SegmentMean SegmentSum Selu Sigmoid Sin Sinh Softmax Softplus Softsign SparseMatMul "
        "SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum SparseTensorDenseMatMul Sqrt Square "
        "SquaredDifference Sub Sum Tan Tanh UnsortedSegmentSum Xdivy Xlogy _FusedBatchNormEx _FusedConv2D "
        "_FusedMatMul");
    return new std::set<std::string>(std::istream_iterator<std::string>(words), {});
  }();
  return operations->count(node.type_string()) > 0;
}

// Tells nothing of a value but its shape.
bool IsShape(const Node& node) {
  static const auto* const operations = new std::set<std::string>{"Rank", "Shape", "ShapeN", "Size"};
  return operations->count(node.type_string()) > 0;
}

// What keeps or passes on a value, such as a checkpoint or a fetch, gets it as it is, and so does what makes a number,
// a text or a choice of it.
bool ComputesWith(const Node& node, std::set<const Node*>* seen) {
  if (IsArithmetic(node) || IsShape(node) || !seen->insert(&node).second) return true;
  if (node.op_def().is_stateful() || (KnowledgeOf(node.type_string()) & SW_OP_UPDATES) != 0) return false;
  if (TakesHandle(node)) return false;
  for (const Edge* edge : node.out_edges()) {
    if (edge->IsControlEdge() || !edge->dst()->IsOp()) continue;
    if (!tensorflow::DataTypeIsFloating(node.output_type(edge->src_output()))) return false;
    if (!ComputesWith(*edge->dst(), seen)) return false;
  }
  return true;
}

class Rewrite {
 public:
  Rewrite(Graph* graph, const std::string& worker, DataType dtype)
      : graph_(graph), names_(graph), worker_(worker), dtype_(dtype) {}

  Status Run(WireDtypeResult* result) {
    std::vector<const Edge*> pulled, pushed;
    FindAssigned();
    for (const Edge* edge : graph_->edges()) {
      if (edge->IsControlEdge() || !edge->src()->IsOp() || !edge->dst()->IsOp() ||
          edge->src()->output_type(edge->src_output()) != tensorflow::DT_FLOAT) {
        continue;
      }
      const bool from_here = IsHere(*edge->src()), to_here = IsHere(*edge->dst());
      std::set<const Node*> seen;
      if (!from_here && to_here && IsOnCpu(*edge->src()) && IsParameters(*edge->src()) && !IsAssigned(*edge->src()) &&
          ComputesWith(*edge->dst(), &seen)) {
        pulled.push_back(edge);
      }
      if (from_here && !to_here && IsOnCpu(*edge->dst()) && IsGradient(*edge->dst(), edge->dst_input())) {
        pushed.push_back(edge);
      }
    }
    if (pushed.empty()) return OkStatus();
    std::set<std::pair<const Node*, int>> values;
    Status status;
    for (const Edge* edge : pulled) {
      values.insert({edge->src(), edge->src_output()});
      if (status.ok()) status = Narrow(edge, edge->src()->assigned_device_name(), worker_);
    }
    result->pulled = values.size();
    values.clear();
    for (const Edge* edge : pushed) {
      values.insert({edge->src(), edge->src_output()});
      if (status.ok()) status = Narrow(edge, worker_, edge->dst()->assigned_device_name());
    }
    result->pushed = values.size();
    return status;
  }

 private:
  bool IsHere(const Node& node) const {
    return DeviceNameUtils::IsSameAddressSpace(node.assigned_device_name(), worker_);
  }

  // A variable that gets values other than gradients may get its own again: rounded in each step, it would lose what
  // changes it less than that.
  void FindAssigned() {
    for (const Edge* edge : graph_->edges()) {
      if (edge->IsControlEdge() || !edge->src()->IsOp() || !edge->dst()->IsOp()) continue;
      if (!IsHandle(edge->dst()->input_type(edge->dst_input())) || KeepsVariables(*edge->dst())) continue;
      const Node* origin = OriginOf(edge->src());
      if (IsOtherObject(origin)) continue;
      if (origin != nullptr && IsVariable(*origin)) {
        assigned_.insert({origin->assigned_device_name(), VariableName(*origin)});
      } else {
        any_assigned_ = true;
      }
    }
  }

  // Of a read or lookup.
  bool IsAssigned(const Node& node) const {
    const Node* from = InputOf(node, 0);
    if (from != nullptr && from->type_string() == "ReadVariableOp") from = InputOf(*from, 0);
    const Node* variable = OriginOf(from);
    return any_assigned_ || variable == nullptr ||
           assigned_.count({variable->assigned_device_name(), VariableName(*variable)}) > 0;
  }

  static bool IsOnCpu(const Node& node) {
    DeviceNameUtils::ParsedName name;
    return DeviceNameUtils::ParseFullName(node.assigned_device_name(), &name) && name.type == tensorflow::DEVICE_CPU;
  }

  Status Cast(Node* from, int output, DataType type, const std::string& device, Node** out) {
    Node*& made = casts_[{from, output, device}];
    Status status;
    if (made == nullptr) {
      tensorflow::NodeDef def;
      def.set_name(names_.Take(from->name() + "/starwire_" + (type == dtype_ ? "narrow" : "wide")));
      def.set_op("Cast");
      def.set_device(device);
      tensorflow::AddNodeAttr("SrcT", type == dtype_ ? tensorflow::DT_FLOAT : dtype_, &def);
      tensorflow::AddNodeAttr("DstT", type, &def);
      tensorflow::AddNodeAttr("Truncate", false, &def);
      made = graph_->AddNode(std::move(def), &status);
      if (!status.ok()) return status;
      made->set_assigned_device_name(device);
      graph_->AddEdge(from, output, made, 0);
    }
    *out = made;
    return status;
  }

  Status Narrow(const Edge* edge, const std::string& from, const std::string& to) {
    Node *narrow = nullptr, *wide = nullptr;
    Status status = Cast(edge->src(), edge->src_output(), dtype_, from, &narrow);
    if (status.ok()) status = Cast(narrow, 0, tensorflow::DT_FLOAT, to, &wide);
    if (!status.ok()) return status;
    Node* user = edge->dst();
    const int input = edge->dst_input();
    graph_->RemoveEdge(edge);
    graph_->AddEdge(wide, 0, user, input);
    return status;
  }

  Graph* const graph_;
  FreeNames names_;
  const std::string& worker_;
  const DataType dtype_;
  std::set<std::pair<std::string, std::string>> assigned_;  // by device and name
  bool any_assigned_ = false;
  std::map<std::tuple<const Node*, int, std::string>, Node*> casts_;  // by what is cast and where
};

}  // namespace

DataType WireDtypeOf(const tensorflow::ConfigProto& config) {
  const auto found = config.device_count().find(kMark);
  const bool is_known = found != config.device_count().end() && found->second == tensorflow::DT_BFLOAT16;
  return is_known ? tensorflow::DT_BFLOAT16 : tensorflow::DT_INVALID;
}

Status ApplyWireDtype(Graph* graph, const std::string& worker, DataType dtype, WireDtypeResult* result) {
  if (dtype == tensorflow::DT_INVALID) return OkStatus();
  return Rewrite(graph, worker, dtype).Run(result);
}

std::string TextOf(const WireDtypeResult& result, DataType dtype) {
  if (result.pulled + result.pushed == 0) return "";
  return ", " + std::to_string(result.pulled) + " pulled and " + std::to_string(result.pushed) +
         " pushed values cross as " + tensorflow::DataTypeString(dtype);
}

}  // namespace starwire
