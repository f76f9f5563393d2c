#include "cc/graph/description.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "cc/base/guard.h"
#include "cc/base/status_codec.h"
#include "cc/graph/operations.h"
#include "cc/tensor/elements.h"
#include "tensorflow/core/common_runtime/shape_refiner.h"
#include "tensorflow/core/framework/memory_types.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {

using tensorflow::DataType;
using tensorflow::DeviceNameUtils;
using tensorflow::Edge;
using tensorflow::Node;

namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
// Finding out which fetches depend on which feeds takes a walk through the graph for each fetch. If that is too much,
// every feed is treated as one that the client may hold back.
constexpr uint64_t kMostSteps = 20 * 1000 * 1000;
// The guesses of FindSizes(): examples in a batch, and bytes in a string.
constexpr int64_t kTypicalRows = 512;
constexpr int64_t kTypicalString = 32;

bool IsOfClient(const Node& node) {
  bool of_client = false;
  return tensorflow::TryGetNodeAttr(node.attrs(), "client_terminated", &of_client) && of_client;
}

// To another task, the value behind a reference travels like any other.
uint32_t TypeClass(const Edge& edge, bool crosses) {
  if (edge.IsControlEdge()) return SW_EDGE_CONTROL;
  if (tensorflow::IsRefType(edge.dst()->input_type(edge.dst_input()))) return SW_EDGE_REF;
  if (!crosses && tensorflow::IsRefType(edge.src()->output_type(edge.src_output()))) return SW_EDGE_DEREF;
  const DataType dtype = tensorflow::BaseType(edge.src()->output_type(edge.src_output()));
  if (dtype == tensorflow::DT_STRING) return SW_EDGE_STRING;
  if (dtype == tensorflow::DT_RESOURCE) return SW_EDGE_RESOURCE;
  return RawSize(dtype) != 0 ? SW_EDGE_PLAIN : SW_EDGE_VARIANT;
}

}  // namespace

GraphDescription::GraphDescription(const tensorflow::Graph& graph)
    : graph_(graph), numbers_(graph.num_node_ids(), kNone) {
  for (Node* node : graph.op_nodes()) {
    const Place& place = PlaceOf(*node);
    for (const Edge* edge : node->in_edges()) {
      crosses_ = crosses_ || (edge->src()->IsOp() && PlaceOf(*edge->src()).task != place.task);
    }
  }
  if (!crosses_) return;
  for (Node* node : graph.op_nodes()) has_captures_ = has_captures_ || IsCaptured(*node);
  for (Node* node : graph.op_nodes()) AddNode(node);
  // In a fixed order: by node, then by input.
  std::vector<const Edge*> in;
  for (Node* node : nodes_) {
    in.clear();
    for (const Edge* edge : node->in_edges()) {
      if (edge->src()->IsOp()) in.push_back(edge);
    }
    std::sort(in.begin(), in.end(), [](const Edge* a, const Edge* b) {
      return std::make_tuple(a->dst_input(), a->src()->id(), a->src_output()) <
             std::make_tuple(b->dst_input(), b->src()->id(), b->src_output());
    });
    for (const Edge* edge : in) AddEdge(edge);
  }
}

const GraphDescription::Place& GraphDescription::PlaceOf(const Node& node) {
  const std::string& device = node.assigned_device_name();
  const auto found = places_.find(device);
  if (found != places_.end()) return found->second;
  std::string task, local;
  if (!DeviceNameUtils::SplitDeviceName(device, &task, &local)) task = device;
  const auto number = task_numbers_.emplace(task, static_cast<uint32_t>(tasks_.size()));
  if (number.second) tasks_.push_back(task);
  DeviceNameUtils::ParsedName parsed;
  const bool known = DeviceNameUtils::ParseFullName(device, &parsed) && parsed.has_type;
  const Place place{number.first->second, static_cast<uint32_t>(places_.size()), known ? parsed.type : "CPU"};
  return places_.emplace(device, place).first->second;
}

void GraphDescription::AddNode(Node* node) {
  const Place& place = PlaceOf(*node);
  sw_plan_node out = {};
  out.task = place.task;
  out.device = place.device;
  out.kind = SW_NODE_PLAIN;
  out.cost_us = -1;
  out.flags = NodeFlags(*node);
  if (node->IsSwitch()) {
    out.kind = SW_NODE_SWITCH;
    out.detail = static_cast<uint32_t>(node->num_outputs());
  } else if (node->IsMerge()) {
    out.kind = SW_NODE_MERGE;
  } else if (node->IsEnter()) {
    std::string frame;
    tensorflow::TryGetNodeAttr(node->attrs(), "frame_name", &frame);
    out.kind = SW_NODE_ENTER;
    out.detail = frames_.emplace(frame, static_cast<uint32_t>(frames_.size())).first->second;
    bool is_constant = false;
    if (tensorflow::TryGetNodeAttr(node->attrs(), "is_constant", &is_constant) && is_constant) {
      out.flags |= SW_NODE_IS_INVARIANT;
    }
  } else if (node->IsExit()) {
    out.kind = SW_NODE_EXIT;
  } else if (node->IsNextIteration()) {
    out.kind = SW_NODE_NEXT_ITERATION;
  } else if (node->IsLoopCond()) {
    out.kind = SW_NODE_LOOP_COND;
  } else if (node->IsControlTrigger()) {
    out.kind = SW_NODE_CONTROL_TRIGGER;
  } else if (node->IsIdentity()) {
    out.kind = SW_NODE_IDENTITY;
  } else if (node->IsRecv() && IsOfClient(*node)) {
    out.kind = SW_NODE_FEED;
  } else if (node->IsSend() && IsOfClient(*node)) {
    out.kind = SW_NODE_FETCH;
  } else if (node->IsRecv()) {
    out.kind = SW_NODE_RECEIVE;
  } else if (IsCaptured(*node) || IsVariable(*node)) {
    // Any two handles of a function that is given handles may be the same variable.
    const bool is_handle = has_captures_ && node->output_type(0) == tensorflow::DT_RESOURCE;
    const std::string name = is_handle ? std::string() : VariableName(*node);
    out.detail = variables_.emplace(name, static_cast<uint32_t>(variables_.size() + 1)).first->second;
  }
  // The client's feeds are present when the step begins, except in partial runs: see FindFeeds().
  if (out.kind == SW_NODE_FEED || out.kind == SW_NODE_FETCH) {
    out.flags &= ~(SW_NODE_IS_BLOCKING | SW_NODE_IS_STATEFUL);
  }
  // Such a tensor is part of a larger one, which its consumer expects.
  if (node->attrs().Find("_scoped_allocator") != nullptr) out.flags |= SW_NODE_IS_UNTOUCHABLE;
  numbers_[node->id()] = static_cast<uint32_t>(nodes_.size());
  nodes_.push_back(node);
  plan_nodes_.push_back(out);
}

void GraphDescription::AddEdge(const Edge* edge) {
  sw_plan_edge out = {};
  out.src = numbers_[edge->src()->id()];
  out.dst = numbers_[edge->dst()->id()];
  out.src_output = edge->IsControlEdge() ? -1 : edge->src_output();
  out.dst_input = edge->IsControlEdge() ? -1 : edge->dst_input();
  out.type_class = TypeClass(*edge, plan_nodes_[out.src].task != plan_nodes_[out.dst].task);
  out.bytes = edge->IsControlEdge() ? 0 : -1;
  const Place& place = PlaceOf(*edge->src());
  if (!edge->IsControlEdge() && place.type != "CPU" && plan_nodes_[out.dst].task != place.task) {
    tensorflow::MemoryTypeVector inputs, outputs;
    const Status status = tensorflow::MemoryTypesForNode(graph_.op_registry(), tensorflow::DeviceType(place.type),
                                                         edge->src()->def(), &inputs, &outputs);
    const size_t output = static_cast<size_t>(edge->src_output());
    const bool on_host = status.ok() && output < outputs.size() && outputs[output] == tensorflow::HOST_MEMORY;
    out.on_device = on_host ? 0 : 1;
  }
  edges_.push_back(edge);
  plan_edges_.push_back(out);
}

void GraphDescription::FindSizes(bool guess) {
  tensorflow::ShapeRefiner refiner(graph_.versions(), graph_.op_registry());
  refiner.set_require_shape_inference_fns(false);
  refiner.set_disable_constant_propagation(true);
  std::vector<Node*> order;
  tensorflow::GetReversePostOrder(graph_, &order);
  for (const Node* node : order) {
    // If a node's shapes cannot be inferred, only those after it are unknown.
    if (node->IsOp()) refiner.AddNode(node).IgnoreError();
  }
  for (size_t i = 0; i < edges_.size(); ++i) {
    sw_plan_edge& edge = plan_edges_[i];
    const bool is_string = guess && edge.type_class == SW_EDGE_STRING;
    if (edge.type_class != SW_EDGE_PLAIN && !is_string) continue;
    if (!guess && plan_nodes_[edge.src].task == plan_nodes_[edge.dst].task) continue;
    tensorflow::shape_inference::InferenceContext* context = refiner.GetContext(edges_[i]->src());
    if (context == nullptr || edge.src_output >= context->num_outputs()) continue;
    const auto shape = context->output(edge.src_output);
    if (!(guess ? context->RankKnown(shape) : context->FullyDefined(shape))) continue;
    const DataType dtype = tensorflow::BaseType(edges_[i]->src()->output_type(edge.src_output));
    int64_t bytes = is_string ? kTypicalString : static_cast<int64_t>(RawSize(dtype));
    bool overflow = false, guessed = false;
    for (int dim = 0; dim < context->Rank(shape); ++dim) {
      int64_t size = context->Value(context->Dim(shape, dim));
      if (size < 0) {
        size = guessed ? 1 : kTypicalRows;
        guessed = true;
      }
      overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
    }
    edge.bytes = overflow ? std::numeric_limits<int64_t>::max() : bytes;
  }
}

uint64_t GraphDescription::CrossingBytes() const {
  uint64_t sum = 0;
  for (const sw_plan_edge& edge : plan_edges_) {
    if (plan_nodes_[edge.src].task == plan_nodes_[edge.dst].task) continue;
    if (edge.bytes > 0 && __builtin_add_overflow(sum, static_cast<uint64_t>(edge.bytes), &sum)) {
      return std::numeric_limits<uint64_t>::max();
    }
  }
  return sum;
}

// In a partial run the client may hold back a feed until it has received a fetch that does not depend on it. A fetch
// that depends on only one of two feeds must then not be tied to the other. Feeds with the same dependent fetches count
// as one, and feeds that all fetches depend on cannot be held back.
void GraphDescription::FindFeeds() {
  std::vector<uint32_t> feeds, fetches;
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    if (plan_nodes_[i].kind == SW_NODE_FEED) feeds.push_back(i);
    if (plan_nodes_[i].kind == SW_NODE_FETCH) fetches.push_back(i);
  }
  if (feeds.empty() || fetches.empty()) return;
  if (static_cast<uint64_t>(fetches.size()) * (nodes_.size() + edges_.size()) > kMostSteps) {
    for (uint32_t feed : feeds) plan_nodes_[feed].flags |= SW_NODE_IS_BLOCKING;
    return;
  }
  std::vector<std::vector<uint32_t>> dependents(nodes_.size());  // by feed: the fetches
  std::vector<uint32_t> seen(nodes_.size(), kNone);
  std::vector<uint32_t> open;
  for (uint32_t fetch : fetches) {
    open.assign(1, fetch);
    seen[fetch] = fetch;
    while (!open.empty()) {
      const uint32_t at = open.back();
      open.pop_back();
      if (plan_nodes_[at].kind == SW_NODE_FEED) dependents[at].push_back(fetch);
      for (const Edge* edge : nodes_[at]->in_edges()) {
        if (!edge->src()->IsOp()) continue;
        const uint32_t source = numbers_[edge->src()->id()];
        if (seen[source] == fetch) continue;
        seen[source] = fetch;
        open.push_back(source);
      }
    }
  }
  std::map<std::pair<uint32_t, std::vector<uint32_t>>, std::vector<uint32_t>> alike;
  for (uint32_t feed : feeds) {
    if (dependents[feed].size() == fetches.size()) continue;
    alike[{plan_nodes_[feed].task, std::move(dependents[feed])}].push_back(feed);
  }
  for (const auto& entry : alike) AddBlocker(entry.first.first, entry.second);
}

// Adds a node that only the planner sees and that all of `feeds` wait for.
void GraphDescription::AddBlocker(uint32_t task, const std::vector<uint32_t>& feeds) {
  const uint32_t number = static_cast<uint32_t>(plan_nodes_.size());
  sw_plan_node blocker = plan_nodes_[feeds.front()];
  blocker.task = task;
  blocker.flags |= SW_NODE_IS_BLOCKING;
  plan_nodes_.push_back(blocker);
  for (uint32_t feed : feeds) {
    sw_plan_edge edge = {};
    edge.src = number;
    edge.src_output = -1;
    edge.dst = feed;
    edge.dst_input = -1;
    edge.type_class = SW_EDGE_CONTROL;
    plan_edges_.push_back(edge);
  }
}

bool GraphDescription::LeaveAlone(uint32_t number) {
  const uint32_t before = std::exchange(plan_nodes_[number].flags, plan_nodes_[number].flags | SW_NODE_IS_UNTOUCHABLE);
  return (before & SW_NODE_IS_UNTOUCHABLE) == 0;
}

sw_plan_graph GraphDescription::ForPlanner() const {
  sw_plan_graph out = {};
  out.struct_size = sizeof(out);
  out.nodes = plan_nodes_.data();
  out.n_nodes = plan_nodes_.size();
  out.edges = plan_edges_.data();
  out.n_edges = plan_edges_.size();
  out.name = Guarded<&GraphDescription::Name>;
  out.name_ctx = const_cast<GraphDescription*>(this);
  return out;
}

sw_bytes GraphDescription::Name(void* self, uint32_t node) {
  const auto* description = static_cast<const GraphDescription*>(self);
  if (node >= description->nodes_.size()) return {nullptr, 0};
  return AsBytes(description->nodes_[node]->name());
}

}  // namespace starwire
