// The first half of StarSplit: the feeds, fetches and nodes of each call.
#include <algorithm>
#include <limits>

#include "cc/base/status_codec.h"
#include "cc/graph/operations.h"
#include "cc/star/plan.h"
#include "cc/star/split.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/lib/strings/proto_serialization.h"

namespace starwire {

using tensorflow::Edge;
using tensorflow::GraphDef;
using tensorflow::Node;
using tensorflow::NodeDef;

namespace {

constexpr uint32_t kNoCall = std::numeric_limits<uint32_t>::max();

tensorflow::DataType TypeOf(const Node& node, int output) { return tensorflow::BaseType(node.output_type(output)); }

// Removes everything that a plan does not need.
void Strip(NodeDef* def) {
  def->clear_input();
  def->clear_experimental_debug_info();
  def->mutable_attr()->erase("_class");
  def->mutable_attr()->erase("_output_shapes");
}

}  // namespace

StarSplit::StarSplit(tensorflow::Graph* graph, const GraphDescription& description, const sw_star_plan* plan,
                     Options options)
    : graph_(graph),
      description_(description),
      options_(std::move(options)),
      plan_(sw_star_plan_lists(plan)),
      in_edges_(description.num_nodes()) {
  kept_.insert(plan_.kept, plan_.kept + plan_.n_kept);
  calls_.resize(plan_.n_calls);
  for (size_t i = 0; i < plan_.n_calls; ++i) {
    const sw_star_call& it = plan_.calls[i];
    Call* call = &calls_[i];
    call->it = &it;
    call->nodes.insert(it.nodes, it.nodes + it.n_nodes);
    call->device = description.task(it.task) + "/device:CPU:0";
    call->spec.task = description.task(it.task);
  }
  for (uint32_t node = 0; node < description.num_nodes(); ++node) numbers_[description.node(node)] = node;
  for (uint32_t edge = 0; edge < description.num_edges(); ++edge) {
    in_edges_[NumberOf(description.edge(edge)->dst())].push_back(edge);
  }
}

Status StarSplit::Prepare() {
  CollectFeeds();
  CollectFetches();
  for (Call& call : calls_) {
    Status status = options_.incarnation_of(call.device, &call.spec.incarnation);
    if (status.ok()) status = MakePlan(&call);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

StarSplit::Call* StarSplit::CallOf(uint32_t node) {
  return plan_.calls_of[node] == kNoCall ? nullptr : &calls_[plan_.calls_of[node]];
}

// By name, so that all workers produce the same plan although they may number their nodes differently.
void StarSplit::Number(std::vector<Output>* outputs, std::map<Output, size_t>* numbers) const {
  std::sort(outputs->begin(), outputs->end(), [this](const Output& a, const Output& b) {
    return std::tie(NameOf(a.first), a.second) < std::tie(NameOf(b.first), b.second);
  });
  outputs->erase(std::unique(outputs->begin(), outputs->end()), outputs->end());
  for (size_t i = 0; i < outputs->size(); ++i) (*numbers)[(*outputs)[i]] = i;
}

void StarSplit::CollectFeeds() {
  std::map<uint32_t, int32_t> next_slot;  // by task
  for (Call& call : calls_) {
    for (size_t i = 0; i < call.it->n_feeds; ++i) {
      const sw_star_feed& feed = call.it->feeds[i];
      const Output output(feed.src, feed.src_output);
      call.feeds.push_back(output);
      if (feed.way == SW_WAY_FEED) continue;
      // A value that is not kept goes through the worker.
      Call* source = CallOf(feed.src);
      source->fetches.push_back(output);
      if (feed.way != SW_WAY_SLOT) {
        source->returned.insert(output);
      } else if (slots_.count(output) == 0) {
        slots_[output] = next_slot[source->it->task]++;
      }
    }
    Number(&call.feeds, &call.feed_numbers);
  }
}

void StarSplit::CollectFetches() {
  for (Call& call : calls_) {
    for (size_t i = 0; i < call.it->n_fetches; ++i) {
      const Output output(call.it->fetches[i].src, call.it->fetches[i].src_output);
      call.fetches.push_back(output);
      call.returned.insert(output);
    }
    Number(&call.fetches, &call.fetch_numbers);
    for (const Output& output : call.fetches) {
      const auto slot = slots_.find(output);
      call.spec.keeps.push_back(slot == slots_.end() ? -1 : slot->second);
      const bool returned = call.returned.count(output) != 0;
      call.spec.returns.push_back(returned ? static_cast<int32_t>(call.spec.outputs.size()) : -1);
      if (returned) call.spec.outputs.push_back(TypeOf(*description_.node(output.first), output.second));
    }
  }
  for (Call& call : calls_) {
    for (const Output& output : call.feeds) {
      const Call* source = CallOf(output.first);
      const auto slot = slots_.find(output);
      // Each server numbers its own slots.
      const bool finds = slot != slots_.end() && source != nullptr && source->it->task == call.it->task;
      call.spec.feeds.push_back(finds ? slot->second : -1);
      if (!finds) call.spec.inputs.push_back(TypeOf(*description_.node(output.first), output.second));
    }
  }
}

Status StarSplit::MakePlan(Call* call) {
  call->spec.function = options_.function;
  GraphDef plan;
  *plan.mutable_versions() = graph_->versions();
  std::vector<uint32_t> nodes(call->it->nodes, call->it->nodes + call->it->n_nodes);
  nodes.insert(nodes.end(), call->it->copies, call->it->copies + call->it->n_copies);
  std::sort(nodes.begin(), nodes.end(), [this](uint32_t a, uint32_t b) { return NameOf(a) < NameOf(b); });
  for (uint32_t node : nodes) call->names.insert(NameOf(node));
  for (size_t i = 0; i < call->feeds.size(); ++i) {
    NodeDef* def = plan.add_node();
    def->set_name(NameIn(*call, "starwire_feed", i));
    def->set_op("_Arg");
    def->set_device(call->device);
    const Output& output = call->feeds[i];
    tensorflow::AddNodeAttr("T", TypeOf(*description_.node(output.first), output.second), def);
    tensorflow::AddNodeAttr("index", static_cast<Int64>(i), def);
  }
  for (uint32_t node : nodes) {
    Status status = AddToPlan(*call, node, &plan);
    if (!status.ok()) return status;
    if (IsCaptured(*description_.node(node))) AddHandle(node, call, plan.mutable_node(plan.node_size() - 1));
  }
  for (size_t i = 0; i < call->fetches.size(); ++i) {
    const Output& output = call->fetches[i];
    NodeDef* def = plan.add_node();
    def->set_name(NameIn(*call, "starwire_fetch", i));
    def->set_op("_Retval");
    def->set_device(call->device);
    def->add_input(NameOf(output.first) + ":" + std::to_string(output.second));
    tensorflow::AddNodeAttr("T", TypeOf(*description_.node(output.first), output.second), def);
    tensorflow::AddNodeAttr("index", static_cast<Int64>(i), def);
  }
  if (!tensorflow::SerializeToStringDeterministic(plan, &call->spec.plan)) {
    return MakeStatus(kInternal,
                      "starwire: the part of the graph for " + call->spec.task + ", with " +
                          std::to_string(plan.node_size()) +
                          " nodes, is too large to send (2 GB at most): turn large constants into variables");
  }
  return OkStatus();
}

std::string StarSplit::NameIn(const Call& call, const std::string& kind, size_t number) {
  std::string name = kind + "_" + std::to_string(number);
  while (call.names.count(name) != 0) name += "_";
  return name;
}

void StarSplit::AddHandle(uint32_t number, Call* call, NodeDef* def) const {
  auto& attributes = *def->mutable_attr();
  attributes["index"].set_i(static_cast<int64_t>(call->feeds.size() + call->spec.handles.size()));
  attributes[kHandleAttr].set_b(true);
  call->spec.handles.push_back(ArgumentNumber(number));
}

// TensorFlow gives the component function of a device the arguments there, in the order of the whole function's.
int32_t StarSplit::ArgumentNumber(uint32_t number) const {
  const auto index_of = [](const Node* node) {
    Int64 index = 0;
    tensorflow::TryGetNodeAttr(node->attrs(), "index", &index);
    return index;
  };
  const Node* node = description_.node(number);
  int32_t before = 0;
  for (const Node* other : graph_->op_nodes()) {
    const bool is_beside = other->IsArg() && other->assigned_device_name() == node->assigned_device_name();
    if (is_beside && index_of(other) < index_of(node)) ++before;
  }
  return before;
}

Status StarSplit::AddToPlan(const Call& call, uint32_t number, GraphDef* plan) const {
  const Node* node = description_.node(number);
  NodeDef* def = plan->add_node();
  *def = node->def();
  Strip(def);
  def->set_name(node->name());
  def->set_device(call.device);
  std::vector<std::string> data(node->num_inputs());
  std::set<std::string> controls;
  for (uint32_t at : in_edges_[number]) {
    const Edge* edge = description_.edge(at);
    const std::string input = InputOf(call, number, at);
    if (input.empty()) continue;
    if (edge->IsControlEdge()) {
      controls.insert("^" + input);
    } else {
      data[edge->dst_input()] = input;
    }
  }
  for (const std::string& input : data) {
    if (input.empty()) {
      return MakeStatus(kInternal,
                        "starwire: bug: an input of " + node->name() + " is in no star call to " + call.spec.task);
    }
    def->add_input(input);
  }
  for (const std::string& input : controls) def->add_input(input);
  return OkStatus();
}

// As NodeDef names an input; empty: it is not within the call.
std::string StarSplit::InputOf(const Call& call, uint32_t node, uint32_t at) const {
  const Edge* edge = description_.edge(at);
  const uint32_t source = NumberOf(edge->src());
  const auto output = [&](const std::string& name, int number) {
    return edge->IsControlEdge() ? name : name + ":" + std::to_string(number);
  };
  // A copy's inputs are copies.
  if (call.nodes.count(node) == 0) return output(NameOf(source), edge->src_output());
  switch (plan_.ways[at].way) {
    case SW_WAY_INSIDE:
    case SW_WAY_COPY:
      return output(NameOf(source), edge->src_output());
    case SW_WAY_COPY_OF:
      return output(NameOf(plan_.ways[at].root), 0);
    case SW_WAY_FEED:
    case SW_WAY_SLOT:
    case SW_WAY_DIRECT:
    case SW_WAY_RELAY:
      return output(NameIn(call, "starwire_feed", call.feed_numbers.at({source, edge->src_output()})), 0);
    default:
      return std::string();
  }
}

}  // namespace starwire
