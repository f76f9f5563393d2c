#include "cc/graph/reference_reads.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cc/graph/names.h"
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

std::vector<Node*> ControlInputs(const Node& node) {
  std::vector<Node*> inputs;
  for (const Edge* edge : node.in_edges()) {
    if (edge->IsControlEdge() && edge->src()->IsOp()) inputs.push_back(edge->src());
  }
  return inputs;
}

}  // namespace

Status PinReferenceReads(Graph* graph) {
  std::vector<const Edge*> reads;
  for (const Edge* edge : graph->edges()) {
    if (!TakesValueOfReference(*edge)) continue;
    // Without anything to wait for, the value is the same, except that a reference would cross. Not every accelerator
    // has such an Identity.
    if (ControlInputs(*edge->dst()).empty() && !IsOnCpu(*edge->src())) continue;
    if (!DeviceNameUtils::IsSameAddressSpace(edge->src()->assigned_device_name(),
                                             edge->dst()->assigned_device_name())) {
      reads.push_back(edge);
    }
  }
  FreeNames names(graph);
  // One for all readers that wait for nothing: their value crosses once.
  std::map<std::pair<const Node*, int>, Node*> plain;
  for (const Edge* edge : reads) {
    Node* variable = edge->src();
    Node* reader = edge->dst();
    const int output = edge->src_output();
    const int input = edge->dst_input();
    const bool waits = !ControlInputs(*reader).empty();
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
    for (Node* before : ControlInputs(*reader)) graph->AddControlEdge(before, read);
    if (!waits) plain[{variable, output}] = read;
  }
  return OkStatus();
}

}  // namespace starwire
