#include "cc/graph/reference_reads.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/graph/names.h"
#include "cc/graph/operations.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::DeviceNameUtils;
using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

bool TakesValueOfReference(const Edge& edge) {
  return !edge.IsControlEdge() && edge.src()->IsOp() && edge.dst()->IsOp() &&
         tensorflow::IsRefType(edge.src()->output_type(edge.src_output())) &&
         !tensorflow::IsRefType(edge.dst()->input_type(edge.dst_input()));
}

bool IsOnCpu(const Node& node) {
  DeviceNameUtils::ParsedName name;
  return DeviceNameUtils::ParseFullName(node.assigned_device_name(), &name) && name.type == tensorflow::DEVICE_CPU;
}

// By device and name: the variables whose references are taken, perhaps to change them.
using Variables = std::set<std::pair<std::string, std::string>>;

Variables ReferredTo(const Graph& graph) {
  Variables found;
  for (const Edge* edge : graph.edges()) {
    const bool takes = !edge->IsControlEdge() && edge->src()->IsOp() && edge->dst()->IsOp() &&
                       tensorflow::IsRefType(edge->dst()->input_type(edge->dst_input()));
    if (takes && IsVariable(*edge->src())) {
      found.emplace(edge->src()->assigned_device_name(), VariableName(*edge->src()));
    }
  }
  return found;
}

// What else has a reference has it from an operation that may change the variable.
bool MayChange(const Node& source, const Variables& referred_to) {
  return !IsVariable(source) || referred_to.count({source.assigned_device_name(), VariableName(source)}) > 0;
}

// What the consumer waits for before it looks at the variable, as far as that matters, by the nodes' numbers.
std::map<int, Node*> AwaitedBy(const Edge& read, const Variables& referred_to) {
  const Node& reader = *read.dst();
  const bool is_changed = MayChange(*read.src(), referred_to) && !reader.IsMerge();
  std::map<int, Node*> inputs;
  for (const Edge* edge : reader.in_edges()) {
    if (!edge->src()->IsOp()) continue;
    const bool is_value =
        !edge->IsControlEdge() && !tensorflow::IsRefType(edge->src()->output_type(edge->src_output()));
    if (edge->IsControlEdge() || (is_changed && is_value)) inputs[edge->src()->id()] = edge->src();
  }
  return inputs;
}

}  // namespace

Status PinReferenceReads(Graph* graph) {
  const Variables referred_to = ReferredTo(*graph);
  std::vector<std::pair<const Edge*, std::map<int, Node*>>> reads;
  for (const Edge* edge : graph->edges()) {
    if (!TakesValueOfReference(*edge)) continue;
    // Without anything to wait for, the value is the same, except that a reference would cross. Not every accelerator
    // has such an Identity.
    std::map<int, Node*> awaited = AwaitedBy(*edge, referred_to);
    if (awaited.empty() && !IsOnCpu(*edge->src())) continue;
    if (!DeviceNameUtils::IsSameAddressSpace(edge->src()->assigned_device_name(),
                                             edge->dst()->assigned_device_name())) {
      reads.emplace_back(edge, std::move(awaited));
    }
  }
  FreeNames names(graph);
  // One for all readers that wait for nothing: their value crosses once.
  std::map<std::pair<const Node*, int>, Node*> plain;
  for (const auto& [edge, awaited] : reads) {
    Node* variable = edge->src();
    Node* reader = edge->dst();
    const int output = edge->src_output();
    const int input = edge->dst_input();
    const bool waits = !awaited.empty();
    if (Node* known = waits ? nullptr : plain[{variable, output}]) {
      graph->RemoveEdge(edge);
      graph->AddEdge(known, 0, reader, input);
      continue;
    }
    tensorflow::NodeDef def;
    const std::string for_whom = waits ? "/" + reader->name() + "/" + std::to_string(input) : "";
    def.set_name(names.Take(variable->name() + "/starwire_read/" + std::to_string(output) + for_whom));
    def.set_op("Identity");
    def.set_device(variable->assigned_device_name());
    tensorflow::AddNodeAttr("T", tensorflow::BaseType(variable->output_type(output)), &def);
    Status status;
    Node* read = graph->AddNode(std::move(def), &status);
    if (!status.ok()) return status;
    read->set_assigned_device_name(variable->assigned_device_name());
    graph->RemoveEdge(edge);
    graph->AddEdge(variable, output, read, 0);
    graph->AddEdge(read, 0, reader, input);
    for (const auto& [id, before] : awaited) graph->AddControlEdge(before, read);
    if (!waits) plain[{variable, output}] = read;
  }
  return OkStatus();
}

}  // namespace starwire
