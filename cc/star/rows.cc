#include "cc/star/rows.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "cc/graph/names.h"
#include "cc/star/row_ops.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;
using tensorflow::NodeDef;

struct Output {
  Node* node = nullptr;
  int number = 0;
};

bool IsOn(const Node& node, const std::string& device) { return node.assigned_device_name() == device; }

// Control edges between operations make a node more than a function of its inputs.
bool HasControlEdges(const Node& node) {
  const auto is_control = [](const Edge* edge) {
    return edge->IsControlEdge() && edge->src()->IsOp() && edge->dst()->IsOp();
  };
  return std::any_of(node.in_edges().begin(), node.in_edges().end(), is_control) ||
         std::any_of(node.out_edges().begin(), node.out_edges().end(), is_control);
}

bool Input(const Node& node, int number, Output* out) {
  const Edge* edge = nullptr;
  if (!node.input_edge(number, &edge).ok() || !edge->src()->IsOp()) return false;
  *out = {edge->src(), edge->src_output()};
  return true;
}

std::vector<const Edge*> Users(const Node& node, int output) {
  std::vector<const Edge*> users;
  for (const Edge* edge : node.out_edges()) {
    if (!edge->IsControlEdge() && edge->src_output() == output) users.push_back(edge);
  }
  return users;
}

// The only node that takes an output of `node`.
Node* OnlyUser(const Node& node, int output) {
  const std::vector<const Edge*> users = Users(node, output);
  return users.size() == 1 ? users.front()->dst() : nullptr;
}

bool TypeOf(const Node& node, const char* attribute, DataType* type) {
  return tensorflow::GetNodeAttr(node.attrs(), attribute, type).ok();
}

bool IsId(DataType type) { return type == tensorflow::DT_INT32 || type == tensorflow::DT_INT64; }

// Whether the input is a constant with this only element.
bool IsConstant(const Node& node, int number, int64_t expected) {
  Output from;
  tensorflow::Tensor value;
  if (!Input(node, number, &from) || from.node->type_string() != "Const" || HasControlEdges(*from.node)) return false;
  if (!tensorflow::GetNodeAttr(from.node->attrs(), "value", &value).ok() || value.NumElements() != 1) return false;
  if (value.dtype() == tensorflow::DT_INT32) return value.flat<int32_t>()(0) == expected;
  return value.dtype() == tensorflow::DT_INT64 && value.flat<Int64>()(0) == expected;
}

bool AttributeIs(const Node& node, const char* name, int64_t expected) {
  Int64 value = 0;
  return tensorflow::GetNodeAttr(node.attrs(), name, &value).ok() && value == expected;
}

class Rewrite {
 public:
  Rewrite(Graph* graph, const std::string& worker, const std::vector<std::string>& servers)
      : graph_(graph), names_(graph), worker_(worker), servers_(servers) {}

  Status Run(RowsResult* result) {
    std::vector<Node*> uniques, gathers;
    for (Node* node : graph_->op_nodes()) {
      if (std::find(servers_.begin(), servers_.end(), node->assigned_device_name()) == servers_.end()) continue;
      if (node->type_string() == "Unique") uniques.push_back(node);
      if (node->type_string() == "ResourceGather" || node->type_string() == "GatherV2") gathers.push_back(node);
    }
    Status status;
    for (size_t i = 0; status.ok() && i < gathers.size(); ++i) status = LookUp(gathers[i], &result->lookups);
    for (size_t i = 0; status.ok() && i < uniques.size(); ++i) status = Sum(uniques[i], &result->sums);
    return status;
  }

 private:
  Status Add(const std::string& name, const char* op, std::vector<std::pair<const char*, DataType>> types, Node** out) {
    NodeDef def;
    def.set_name(names_.Take(name));
    def.set_op(op);
    def.set_device(worker_);
    for (const auto& type : types) tensorflow::AddNodeAttr(type.first, type.second, &def);
    Status status;
    *out = graph_->AddNode(std::move(def), &status);
    if (status.ok()) (*out)->set_assigned_device_name(worker_);
    return status;
  }

  void Redirect(const Node& from, int output, Node* to, int to_output) {
    for (const Edge* edge : Users(from, output)) {
      Node* user = edge->dst();
      const int input = edge->dst_input();
      if (user == to) continue;
      graph_->RemoveEdge(edge);
      graph_->AddEdge(to, to_output, user, input);
    }
  }

  void RemoveIfUnused(Node* node) {
    const bool used = std::any_of(node->out_edges().begin(), node->out_edges().end(),
                                  [](const Edge* edge) { return edge->dst()->IsOp(); });
    if (!used) graph_->RemoveNode(node);
  }

  static void Replaces(Node* node, const std::vector<const Node*>& replaced) {
    std::vector<std::string> names;
    for (const Node* one : replaced) names.push_back(one->name());
    node->AddAttr(kReplacesAttr, names);
  }

  Status UniqueIds(const Output& ids, DataType type, Node** out) {
    Node*& unique = uniques_[{ids.node, ids.number}];
    Status status;
    if (unique == nullptr) {
      const std::string name = ids.node->name() + "/starwire_unique_" + std::to_string(ids.number);
      status = Add(name, kUniqueIdsOp, {{"Tids", type}}, &unique);
      if (status.ok()) graph_->AddEdge(ids.node, ids.number, unique, 0);
    }
    *out = unique;
    return status;
  }

  // Gradients flatten the ids of a lookup: the ids as that lookup has them, whose unique ids cross anyway.
  Output AsLookedUp(const Output& ids) const {
    Output from, shape;
    if (ids.node->type_string() != "Reshape" || HasControlEdges(*ids.node)) return ids;
    if (!Input(*ids.node, 0, &from) || !Input(*ids.node, 1, &shape)) return ids;
    return uniques_.count({from.node, from.number}) > 0 && ComesFrom(*shape.node, from, 5) ? from : ids;
  }

  // Whether `node` follows from `origin` alone. It then runs in a branch if and only if `origin` does.
  static bool ComesFrom(const Node& node, const Output& origin, int depth) {
    static const std::set<std::string> known = {"Const", "Size", "Shape", "ExpandDims", "Pack", "Cast", "Identity"};
    if (depth == 0 || known.count(node.type_string()) == 0) return false;
    return std::all_of(node.in_edges().begin(), node.in_edges().end(), [&](const Edge* edge) {
      if (!edge->src()->IsOp()) return true;
      if (edge->IsControlEdge()) return false;
      const bool is_origin = edge->src() == origin.node && edge->src_output() == origin.number;
      return is_origin || ComesFrom(*edge->src(), origin, depth - 1);
    });
  }

  // What optimizers make of a sparse gradient before they apply it: Unique(ids), and
  // UnsortedSegmentSum(values, positions, Shape(unique)[0]).
  Status Sum(Node* unique, size_t* count) {
    const std::string& server = unique->assigned_device_name();
    Node* sum = OnlyUser(*unique, 1);
    if (sum == nullptr || sum->type_string() != "UnsortedSegmentSum") return OkStatus();
    Output ids, values, length, shape, counted;
    if (!Input(*unique, 0, &ids) || !Input(*sum, 0, &values) || !Input(*sum, 2, &length)) return OkStatus();
    if (length.node->type_string() != "StridedSlice" || !Input(*length.node, 0, &shape)) return OkStatus();
    if (shape.node->type_string() != "Shape" || !Input(*shape.node, 0, &counted)) return OkStatus();
    const Edge* positions = nullptr;
    if (counted.node != unique || counted.number != 0 || !sum->input_edge(1, &positions).ok() ||
        positions->src() != unique) {
      return OkStatus();
    }
    if (!IsOn(*ids.node, worker_) || !IsOn(*values.node, worker_)) return OkStatus();
    for (const Node* node : {unique, sum, length.node, shape.node}) {
      if (!IsOn(*node, server) || HasControlEdges(*node)) return OkStatus();
    }
    if (OnlyUser(*length.node, 0) != sum || OnlyUser(*shape.node, 0) != length.node) return OkStatus();
    const bool takes_first = IsConstant(*length.node, 1, 0) && IsConstant(*length.node, 2, 1) &&
                             IsConstant(*length.node, 3, 1) && AttributeIs(*length.node, "shrink_axis_mask", 1) &&
                             AttributeIs(*length.node, "begin_mask", 0) && AttributeIs(*length.node, "end_mask", 0) &&
                             AttributeIs(*length.node, "ellipsis_mask", 0) &&
                             AttributeIs(*length.node, "new_axis_mask", 0);
    DataType type, id_type;
    if (!takes_first || !TypeOf(*sum, "T", &type) || !TypeOf(*unique, "T", &id_type) || !IsId(id_type) ||
        (type != tensorflow::DT_FLOAT && type != tensorflow::DT_DOUBLE)) {
      return OkStatus();
    }
    Node *once = nullptr, *rows = nullptr;
    Status status = UniqueIds(AsLookedUp(ids), id_type, &once);
    if (status.ok()) {
      status = Add(sum->name() + "/starwire_rows", kSumRowsOp, {{"Tids", id_type}, {"T", type}}, &rows);
    }
    if (!status.ok()) return status;
    Replaces(rows, {unique, sum, length.node, shape.node});
    graph_->AddEdge(ids.node, ids.number, rows, 0);
    graph_->AddEdge(values.node, values.number, rows, 1);
    graph_->AddEdge(once, 0, rows, 2);
    graph_->AddEdge(once, 1, rows, 3);
    std::vector<Node*> constants;
    for (int input = 1; input <= 3; ++input) {
      Output constant;
      if (Input(*length.node, input, &constant)) constants.push_back(constant.node);
    }
    for (Node* node : {sum, length.node, shape.node}) {
      if (node == sum) Redirect(*sum, 0, rows, 0);
      graph_->RemoveNode(node);
    }
    Redirect(*unique, 0, once, 0);
    graph_->RemoveNode(unique);
    std::sort(constants.begin(), constants.end());
    constants.erase(std::unique(constants.begin(), constants.end()), constants.end());
    for (Node* node : constants) RemoveIfUnused(node);
    ++*count;
    return OkStatus();
  }

  // Whether all values that the node makes go to the worker.
  bool IsForWorker(const Node& node) const {
    const std::vector<const Edge*> users = Users(node, 0);
    return !users.empty() &&
           std::all_of(users.begin(), users.end(), [this](const Edge* edge) { return IsOn(*edge->dst(), worker_); });
  }

  Status LookUp(Node* gather, size_t* count) {
    const bool is_resource = gather->type_string() == "ResourceGather";
    Output ids, rows_of;
    if (!Input(*gather, 0, &rows_of) || !Input(*gather, 1, &ids)) return OkStatus();
    if (IsOn(*rows_of.node, worker_) || !IsOn(*ids.node, worker_) || !IsForWorker(*gather)) return OkStatus();
    if (!AttributeIs(*gather, "batch_dims", 0) || (!is_resource && !IsConstant(*gather, 2, 0))) return OkStatus();
    DataType type, id_type;
    if (!TypeOf(*gather, is_resource ? "dtype" : "Tparams", &type) || !TypeOf(*gather, "Tindices", &id_type) ||
        !IsId(id_type) || !CanCopyRows(type)) {
      return OkStatus();
    }
    Node *unique = nullptr, *copied = nullptr;
    Status status = UniqueIds(ids, id_type, &unique);
    if (status.ok()) status = Add(gather->name() + "/starwire_rows", kCopyRowsOp, {{"T", type}}, &copied);
    if (!status.ok()) return status;
    Replaces(gather, {gather});
    const Edge* old = nullptr;
    status = gather->input_edge(1, &old);
    if (!status.ok()) return status;
    graph_->RemoveEdge(old);
    graph_->AddEdge(unique, 0, gather, 1);
    Redirect(*gather, 0, copied, 0);
    graph_->AddEdge(gather, 0, copied, 0);
    graph_->AddEdge(unique, 1, copied, 1);
    ++*count;
    return OkStatus();
  }

  Graph* const graph_;
  FreeNames names_;
  const std::string& worker_;
  const std::vector<std::string>& servers_;
  std::map<std::pair<Node*, int>, Node*> uniques_;  // by ids
};

}  // namespace

Status SendRowsOnce(Graph* graph, const std::string& worker, const std::vector<std::string>& servers,
                    RowsResult* result) {
  return Rewrite(graph, worker, servers).Run(result);
}

}  // namespace starwire
