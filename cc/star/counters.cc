#include "cc/star/counters.h"

#include <algorithm>
#include <set>
#include <utility>

#include "cc/graph/names.h"
#include "cc/graph/operations.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {
namespace {

using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

bool IsNoOp(const Node& node) { return node.type_string() == "NoOp"; }

// Adds a whole number that is the same in every step.
bool IsCounter(const Node& node) {
  const bool is_resource = node.type_string() == "AssignAddVariableOp";
  if (!is_resource && node.type_string() != "AssignAdd") return false;
  const Node* added = nullptr;
  tensorflow::Tensor value;
  if (!node.input_node(1, &added).ok() || added->type_string() != "Const" ||
      !tensorflow::GetNodeAttr(added->attrs(), "value", &value).ok() || value.dims() != 0) {
    return false;
  }
  return value.dtype() == tensorflow::DT_INT64 || value.dtype() == tensorflow::DT_INT32;
}

// Whether nothing in the graph comes after the node.
bool IsLast(const Node& node) {
  return std::all_of(node.out_edges().begin(), node.out_edges().end(), [](const Edge* edge) {
    return !edge->dst()->IsOp() || (edge->IsControlEdge() && IsNoOp(*edge->dst()) && IsLast(*edge->dst()));
  });
}

// What a control dependency waits for: the nodes behind those that only gather others.
void AddAwaited(const Node& node, std::set<const Node*>* gathering, std::set<Node*>* awaited) {
  for (const Edge* edge : node.in_edges()) {
    if (!edge->IsControlEdge() || !edge->src()->IsOp()) continue;
    if (!IsNoOp(*edge->src())) {
      awaited->insert(edge->src());
    } else if (gathering->insert(edge->src()).second) {
      AddAwaited(*edge->src(), gathering, awaited);
    }
  }
}

std::vector<Node*> NodesBefore(Node* node) {
  std::vector<Node*> before;
  std::set<Node*> seen = {node};
  for (std::vector<Node*> open = {node}; !open.empty();) {
    const Node* next = open.back();
    open.pop_back();
    for (const Edge* edge : next->in_edges()) {
      if (!edge->src()->IsOp() || !seen.insert(edge->src()).second) continue;
      before.push_back(edge->src());
      open.push_back(edge->src());
    }
  }
  return before;
}

// Whether the node may be in a branch, so that it does not run in every step. What is fed always arrives.
bool Branches(const Node& node) {
  bool is_fed = false;
  if (node.IsRecv()) return !tensorflow::TryGetNodeAttr(node.attrs(), "client_terminated", &is_fed) || !is_fed;
  return node.IsControlFlow();
}

bool TakesVariable(const Node& node, const Node& variable) {
  return std::any_of(node.in_edges().begin(), node.in_edges().end(), [&](const Edge* edge) {
    const Node& from = *edge->src();
    return !edge->IsControlEdge() && from.IsOp() && IsVariable(from) &&
           from.assigned_device_name() == variable.assigned_device_name() &&
           VariableName(from) == VariableName(variable);
  });
}

// What may look at the variable: what takes it, and what takes the handle or the memory from there.
std::set<const Node*> UsersOf(const Graph& graph, const Node& variable) {
  std::set<const Node*> users;
  std::vector<const Node*> open;
  for (const Node* node : graph.op_nodes()) {
    if (TakesVariable(*node, variable)) open.push_back(node);
  }
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (!users.insert(node).second) continue;
    for (const Edge* edge : node->out_edges()) {
      const Node& user = *edge->dst();
      if (edge->IsControlEdge() || !user.IsOp() || user.assigned_device_name() != node->assigned_device_name())
        continue;
      const bool may_pass =
          tensorflow::BaseType(node->output_type(edge->src_output())) == tensorflow::BaseType(variable.output_type(0));
      if (may_pass) open.push_back(&user);
    }
  }
  return users;
}

// Whether it needs more than a variable, or a user of it needs it.
bool Waits(const Node& node, const std::set<const Node*>& users, std::set<const Node*>* seen) {
  if (!seen->insert(&node).second) return false;
  return std::any_of(node.in_edges().begin(), node.in_edges().end(), [&](const Edge* edge) {
    const Node& from = *edge->src();
    if (!from.IsOp() || IsVariable(from)) return false;
    return edge->IsControlEdge() || users.count(&from) == 0 || Waits(from, users, seen);
  });
}

// Only changes variables, and does not fail for a value as `CountUpTo` does. (That of rows that do not exist does: the
// lookup of the same rows failed before.)
bool IsUpdate(const Node& node) {
  return (KnowledgeOf(node.type_string()) & SW_OP_UPDATES) != 0 && node.type_string() != "CountUpTo" &&
         node.type_string() != "ResourceCountUpTo";
}

// Prepares what an update takes, and does not fail because of a value.
bool OnlyPrepares(const Node& node) {
  static const std::set<std::string> names = {
      "Add", "AddN", "AddV2",    "Cast",           "ClipByValue", "Const", "Identity", "Maximum", "Mul", "Minimum",
      "Neg", "NoOp", "OnesLike", "ReadVariableOp", "RealDiv",     "Rsqrt", "Sqrt",     "Square",  "Sub", "ZerosLike",
  };
  if (node.type_string() == "Pow") return tensorflow::DataTypeIsFloating(node.output_type(0));
  return IsVariable(node) || names.count(node.type_string()) > 0;
}

// Whose control dependencies hold the counter back. TensorFlow gives them to the constant if it is made beside it.
std::vector<Node*> Gates(Node* counter) {
  Node* added = nullptr;
  if (!counter->input_node(1, &added).ok() || added->out_edges().size() != 1) return {counter};
  return {counter, added};
}

class Rewrite {
 public:
  Rewrite(Graph* graph, const std::string& worker, const std::vector<std::string>& servers)
      : graph_(graph), names_(graph), worker_(worker), servers_(servers.begin(), servers.end()) {}

  Status Run(size_t* counters) {
    std::vector<Node*> found;
    for (Node* node : graph_->op_nodes()) {
      if (servers_.count(node->assigned_device_name()) > 0 && IsCounter(*node) && IsLast(*node)) found.push_back(node);
    }
    Status status;
    for (size_t i = 0; status.ok() && i < found.size(); ++i) status = Uncouple(found[i], counters);
    return status;
  }

 private:
  bool IsElsewhere(const Node& node, const Node& counter) const {
    const std::string& device = node.assigned_device_name();
    return device != counter.assigned_device_name() && servers_.count(device) > 0;
  }

  // Collects what an update on another server waits for outside of that server: the counter waits for that instead, as
  // a step that fails there must not be counted. False if an operation on the other server may fail as well.
  bool AddBefore(const Node& update, const Node& counter, std::set<const Node*>* seen, std::set<Node*>* before) const {
    for (const Edge* edge : update.in_edges()) {
      Node* node = edge->src();
      if (!node->IsOp() || !seen->insert(node).second) continue;
      if (IsElsewhere(*node, counter)) {
        if (!(IsUpdate(*node) || OnlyPrepares(*node)) || !AddBefore(*node, counter, seen, before)) return false;
      } else if (!node->IsConstant() && !IsVariable(*node)) {
        before->insert(node);
      }
    }
    return true;
  }

  Status Uncouple(Node* counter, size_t* counters) {
    std::set<Node*> awaited;
    std::set<const Node*> gathering;
    const std::vector<Node*> gates = Gates(counter);
    for (Node* gate : gates) AddAwaited(*gate, &gathering, &awaited);
    std::set<Node*> kept;
    bool has_own = false;
    bool is_uncoupled = false;
    std::set<const Node*> seen;
    for (Node* node : awaited) {
      std::set<Node*> before;
      if (IsElsewhere(*node, *counter) && IsUpdate(*node) && AddBefore(*node, *counter, &seen, &before)) {
        kept.insert(before.begin(), before.end());
        is_uncoupled = true;
        continue;
      }
      kept.insert(node);
      const bool updates = (KnowledgeOf(node->type_string()) & SW_OP_UPDATES) != 0;
      has_own = has_own || (updates && node->assigned_device_name() == counter->assigned_device_name());
    }
    const Node* variable = nullptr;
    if (!has_own || !is_uncoupled || !counter->input_node(0, &variable).ok() || !IsVariable(*variable)) {
      return OkStatus();
    }
    const std::vector<Node*> before_counter = NodesBefore(counter);
    const std::set<const Node*> is_before(before_counter.begin(), before_counter.end());
    const std::set<const Node*> users = UsersOf(*graph_, *variable);
    for (const Node* node : users) {
      // No edge orders it with the counter: what it waits for does.
      std::set<const Node*> seen;
      if (node != counter && is_before.count(node) == 0 && Waits(*node, users, &seen)) return OkStatus();
    }
    for (Node* node : before_counter) {
      if (Branches(*node)) return OkStatus();
      if (!TakesVariable(*node, *variable)) continue;
      // A read that it waited for by way of another server: a rate that depends on the global step.
      if (node->type_string() != "ReadVariableOp") return OkStatus();
      kept.insert(node);
    }
    // TensorFlow removes nodes that nothing depends on: another node waits for everything instead.
    tensorflow::NodeDef def;
    def.set_name(names_.Take(counter->name() + "/starwire_all"));
    def.set_op("NoOp");
    def.set_device(worker_);
    Status status;
    Node* all = graph_->AddNode(std::move(def), &status);
    if (!status.ok()) return status;
    all->set_assigned_device_name(worker_);
    std::vector<const Edge*> old;
    for (Node* gate : gates) {
      for (const Edge* edge : gate->in_edges()) {
        if (edge->IsControlEdge() && edge->src()->IsOp()) old.push_back(edge);
      }
    }
    for (const Edge* edge : old) {
      graph_->AddControlEdge(edge->src(), all);
      graph_->RemoveEdge(edge);
    }
    for (Node* node : kept) graph_->AddControlEdge(node, counter);
    graph_->AddControlEdge(all, graph_->sink_node());
    ++*counters;
    return OkStatus();
  }

  Graph* const graph_;
  FreeNames names_;
  const std::string& worker_;
  const std::set<std::string> servers_;
};

}  // namespace

Status UncoupleCounters(Graph* graph, const std::string& worker, const std::vector<std::string>& servers,
                        size_t* counters) {
  return Rewrite(graph, worker, servers).Run(counters);
}

}  // namespace starwire
