#include "cc/star/split.h"

#include <algorithm>
#include <utility>

#include "cc/graph/names.h"
#include "cc/graph/operations.h"
#include "cc/worker/step_handles.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/graph/algorithm.h"

namespace starwire {

using tensorflow::Edge;
using tensorflow::Node;
using tensorflow::NodeDef;

namespace {

// "ps_1"
std::string ShortName(const std::string& task) {
  std::string name;
  for (const std::string part : {"/job:", "/task:"}) {
    const size_t found = task.find(part);
    if (found == std::string::npos) continue;
    const size_t begin = found + part.size();
    if (!name.empty()) name += "_";
    name += task.substr(begin, task.find('/', begin) - begin);
  }
  return name;
}

// By id: whether the node has run, or will not run in this step, when `node` does. A Merge waits for one of its values
// only.
std::vector<bool> AllBefore(const tensorflow::Graph& graph, const Node* node) {
  std::vector<bool> before(static_cast<size_t>(graph.num_node_ids()), false);
  before[node->id()] = true;
  std::vector<const Node*> open = {node};
  while (!open.empty()) {
    const Node* at = open.back();
    open.pop_back();
    for (const Edge* edge : at->in_edges()) {
      if ((at->IsMerge() && !edge->IsControlEdge()) || before[edge->src()->id()]) continue;
      before[edge->src()->id()] = true;
      open.push_back(edge->src());
    }
  }
  return before;
}

}  // namespace

Status StarSplit::Apply() {
  Status status = AddNodes();
  for (uint32_t edge = 0; status.ok() && edge < description_.num_edges(); ++edge) status = Rewire(edge);
  for (size_t i = 0; status.ok() && i < calls_.size(); ++i) status = RewireCall(&calls_[i]);
  if (!status.ok()) return status;
  Remove();
  for (const NewEdge& edge : new_edges_) {
    if (edge.from.output < 0 || edge.input < 0) {
      graph_->AddControlEdge(edge.from.node, edge.to);
    } else {
      graph_->AddEdge(edge.from.node, edge.from.output, edge.to, edge.input);
    }
  }
  tensorflow::FixupSourceAndSinkEdges(graph_);
  MarkLast();
  return OkStatus();
}

Status StarSplit::AddNodes() {
  for (Call& call : calls_) {
    NodeDef def;
    def.set_name(NumberedName("call_" + ShortName(call.spec.task)));
    def.set_op(kStarCallOp);
    def.set_device(options_.client_device);
    SetAttributes(call.spec, &def);
    Status status = AddNode(std::move(def), &call.op);
    if (!status.ok()) return status;
  }
  for (uint32_t node = 0; node < description_.num_nodes(); ++node) {
    if (!IsPivot(node)) continue;
    Status status = AddPivot(node);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status StarSplit::AddNode(NodeDef def, Node** out) {
  const std::string device = def.device();
  Status status;
  *out = graph_->AddNode(std::move(def), &status);
  if (status.ok()) (*out)->set_assigned_device_name(device);
  return status;
}

// The remainder of a variable's Switch: which branch runs. Of its Enter: that the loop is entered.
Status StarSplit::AddPivot(uint32_t number) {
  const Node* node = description_.node(number);
  if (node->IsEnter()) return AddEntry(number);
  NodeDef def;
  def.set_name(NumberedName("pivot"));
  def.set_op(node->type_string() == "_SwitchN" ? "_SwitchN" : "Switch");
  def.set_device(options_.client_device);
  tensorflow::AddNodeAttr("T", tensorflow::BaseType(node->input_type(1)), &def);
  if (node->type_string() == "_SwitchN") tensorflow::AddNodeAttr("num_outs", node->num_outputs(), &def);
  return AddNode(std::move(def), &pivots_[number].branch);
}

// An Enter that waits for what the variable's waits for, and brings nothing along. Those that wait for nothing are one.
Status StarSplit::AddEntry(uint32_t number) {
  const auto drops = [this](uint32_t edge) { return plan_.ways[edge].way == SW_WAY_DROPPED; };
  const bool waits = !std::all_of(in_edges_[number].begin(), in_edges_[number].end(), drops);
  NodeDef def;
  for (const char* attribute : {"frame_name", "is_constant", "parallel_iterations"}) {
    const auto* value = description_.node(number)->attrs().Find(attribute);
    if (value != nullptr) (*def.mutable_attr())[attribute] = *value;
  }
  Node** shared = &entries_[(*def.mutable_attr())["frame_name"].s()];
  if (!waits && *shared != nullptr) {
    pivots_[number].branch = *shared;
    return OkStatus();
  }
  NodeDef nothing;
  nothing.set_name(NumberedName("nothing"));
  nothing.set_op("Const");
  nothing.set_device(options_.client_device);
  tensorflow::AddNodeAttr("dtype", tensorflow::DT_BOOL, &nothing);
  tensorflow::AddNodeAttr("value", tensorflow::Tensor(false), &nothing);
  def.set_name(NumberedName("enter"));
  def.set_op("Enter");
  def.set_device(options_.client_device);
  tensorflow::AddNodeAttr("T", tensorflow::DT_BOOL, &def);
  Node *constant = nullptr, *enter = nullptr;
  Status status = AddNode(std::move(nothing), &constant);
  if (status.ok()) status = AddNode(std::move(def), &enter);
  if (!status.ok()) return status;
  new_edges_.push_back({{constant, 0}, enter, 0});
  pivots_[number].branch = enter;
  if (!waits) *shared = enter;
  return OkStatus();
}

// A node that runs if, and only if, this branch does.
Status StarSplit::RanIn(uint32_t pivot, int output, Node** out) {
  Pivot* it = &pivots_.at(pivot);
  if (output < 0 || it->branch->IsEnter()) {
    *out = it->branch;
    return OkStatus();
  }
  Node** branch = &it->outputs[output];
  if (*branch == nullptr) {
    NodeDef def;
    def.set_name(NumberedName("branch"));
    def.set_op("Identity");
    def.set_device(options_.client_device);
    tensorflow::AddNodeAttr("T", it->branch->output_type(0), &def);
    Status status = AddNode(std::move(def), branch);
    if (!status.ok()) return status;
    new_edges_.push_back({{it->branch, output}, *branch, 0});
  }
  *out = *branch;
  return OkStatus();
}

Status StarSplit::ConstantFor(uint32_t constant, const std::string& device, Node** out) {
  Node** copy = &constants_[{constant, device}];
  if (*copy == nullptr) {
    NodeDef def = description_.node(constant)->def();
    def.clear_input();
    def.set_name(NumberedName("constant"));
    def.set_device(device);
    def.mutable_attr()->erase("_class");
    Status status = AddNode(std::move(def), copy);
    if (!status.ok()) return status;
  }
  *out = *copy;
  return OkStatus();
}

// The new end of an edge to a node that is in no call.
void StarSplit::Connect(End from, uint32_t at) {
  const Edge* edge = description_.edge(at);
  const uint32_t consumer = NumberOf(edge->dst());
  if (edge->IsControlEdge()) from.output = -1;
  if (!IsPivot(consumer)) {
    new_edges_.push_back({from, edge->dst(), edge->dst_input()});
    return;
  }
  Node* branch = pivots_.at(consumer).branch;
  if (from.output < 0 || edge->dst_input() != 1) {
    new_edges_.push_back({{from.node, -1}, branch, -1});
    return;
  }
  new_edges_.push_back({from, branch, 0});
  new_edges_.push_back({from, branch, 1});
}

Status StarSplit::Rewire(uint32_t at) {
  const Edge* edge = description_.edge(at);
  const uint32_t producer = NumberOf(edge->src());
  const uint32_t consumer = NumberOf(edge->dst());
  if (CallOf(consumer) != nullptr && plan_.ways[at].way != SW_WAY_UNTOUCHED) return OkStatus();
  Node* node = nullptr;
  Status status;
  switch (plan_.ways[at].way) {
    case SW_WAY_UNTOUCHED:
      if (!IsPivot(producer) && !IsPivot(consumer)) return OkStatus();
      if (IsPivot(producer)) {
        status = RanIn(producer, -1, &node);
      } else {
        node = edge->src();
      }
      if (status.ok()) Connect({node, edge->src_output()}, at);
      return status;
    case SW_WAY_COPY: {
      // Copied nodes: gone, or kept with their inputs.
      if (plan_.places[consumer] == SW_PLACE_COPIED) return OkStatus();
      const bool elsewhere = plan_.places[consumer] == SW_PLACE_STAYS;
      const std::string device =
          elsewhere ? description_.task(description_.task_of(consumer)) + "/device:CPU:0" : options_.client_device;
      status = ConstantFor(producer, device, &node);
      if (status.ok()) Connect({node, edge->src_output()}, at);
      return status;
    }
    case SW_WAY_FETCH: {
      const Call* call = CallOf(producer);
      const size_t fetch = call->fetch_numbers.at({producer, edge->src_output()});
      Connect({call->op, call->spec.returns[fetch]}, at);
      return OkStatus();
    }
    case SW_WAY_ORDER:
      if (const Call* call = CallOf(producer)) {
        node = call->op;
      } else if (IsPivot(producer)) {
        status = RanIn(producer, edge->IsControlEdge() ? -1 : edge->src_output(), &node);
      } else {
        node = edge->src();
      }
      if (status.ok()) Connect({node, -1}, at);
      return status;
    default:
      return OkStatus();
  }
}

Status StarSplit::RewireCall(Call* call) {
  int input = 0;
  for (size_t i = 0; i < call->feeds.size(); ++i) {
    const Output& feed = call->feeds[i];
    if (call->spec.feeds[i] >= 0) continue;
    const Call* source = CallOf(feed.first);
    if (source == nullptr) {
      new_edges_.push_back({{description_.node(feed.first), feed.second}, call->op, input++});
    } else {
      const size_t fetch = source->fetch_numbers.at(feed);
      new_edges_.push_back({{source->op, source->spec.returns[fetch]}, call->op, input++});
    }
  }
  for (size_t i = 0; i < call->it->n_after; ++i) {
    new_edges_.push_back({{calls_[call->it->after[i]].op, -1}, call->op, -1});
  }
  for (size_t i = 0; i < call->it->n_controls; ++i) {
    const sw_star_output& control = call->it->controls[i];
    Node* node = description_.node(control.src);
    if (IsPivot(control.src)) {
      Status status = RanIn(control.src, control.src_output, &node);
      if (!status.ok()) return status;
    }
    new_edges_.push_back({{node, -1}, call->op, -1});
  }
  return OkStatus();
}

void StarSplit::Remove() {
  for (uint32_t at = 0; at < description_.num_edges(); ++at) {
    const Edge* edge = description_.edge(at);
    const bool stays =
        plan_.ways[at].way == SW_WAY_UNTOUCHED || (plan_.ways[at].way == SW_WAY_COPY && IsKept(NumberOf(edge->dst())));
    if (!stays) graph_->RemoveEdge(edge);
  }
  for (uint32_t number = 0; number < description_.num_nodes(); ++number) {
    Node* node = description_.node(number);
    switch (plan_.places[number]) {
      case SW_PLACE_MOVED:
        node->set_assigned_device_name(options_.client_device);
        break;
      case SW_PLACE_COPIED:
      case SW_PLACE_CALLED:
        // A handle stays even without users: TensorFlow then says whose it is in each step.
        if (IsCaptured(*node)) {
          node->AddAttr(kHandlesOfAttr, options_.function);
        } else if (plan_.places[number] == SW_PLACE_CALLED || !IsKept(number)) {
          graph_->RemoveNode(node);
        }
        break;
      case SW_PLACE_PIVOT:
        graph_->RemoveNode(node);
        break;
      default:
        break;
    }
  }
}

// A call can free its server's slots if all other calls that use them precede it.
void StarSplit::MarkLast() {
  const auto uses_slots = [](const Call& call) {
    const auto used = [](int32_t slot) { return slot >= 0; };
    return std::any_of(call.spec.feeds.begin(), call.spec.feeds.end(), used) ||
           std::any_of(call.spec.keeps.begin(), call.spec.keeps.end(), used);
  };
  for (Call& call : calls_) {
    if (!uses_slots(call)) continue;
    const std::vector<bool> before = AllBefore(*graph_, call.op);
    call.spec.last = std::all_of(calls_.begin(), calls_.end(), [&](const Call& other) {
      return other.it->task != call.it->task || !uses_slots(other) || before[other.op->id()];
    });
    if (call.spec.last) call.op->AddAttr("last", true);
  }
}

}  // namespace starwire
