#include "cc/graph/orders.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/addition_order.h"
#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "cc/graph/description.h"
#include "cc/graph/names.h"
#include "cc/graph/reference_reads.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::DeviceNameUtils;
using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

// Gives other tasks a copy of an output: of the value, as nothing else may hold its memory. *copy stays null for types
// that have no Snapshot (strings): whoever takes those may see the update.
Status CopyForOthers(Graph* graph, Node* node, int output, FreeNames* names, Node** copy) {
  const std::string& device = node->assigned_device_name();
  DeviceNameUtils::ParsedName place;
  if (!DeviceNameUtils::ParseFullName(device, &place)) return OkStatus();
  tensorflow::NodeDef def;
  def.set_name(names->Take(node->name() + "/starwire_copy/" + std::to_string(output)));
  def.set_op("Snapshot");
  def.set_device(device);
  tensorflow::AddNodeAttr("T", tensorflow::BaseType(node->output_type(output)), &def);
  const tensorflow::DeviceType type(place.type);
  if (!tensorflow::FindKernelDef(type, def, nullptr, nullptr).ok()) return OkStatus();
  Status status;
  Node* made = graph->AddNode(std::move(def), &status);
  if (!status.ok()) return status;
  made->set_assigned_device_name(device);
  std::vector<const Edge*> taken;
  for (const Edge* edge : node->out_edges()) {
    const bool takes = edge->src_output() == output && edge->dst()->IsOp();
    if (takes && !DeviceNameUtils::IsSameAddressSpace(device, edge->dst()->assigned_device_name())) {
      taken.push_back(edge);
    }
  }
  for (const Edge* edge : taken) {
    Node* taker = edge->dst();
    const int input = edge->dst_input();
    graph->RemoveEdge(edge);
    graph->AddEdge(made, 0, taker, input);
  }
  graph->AddEdge(node, output, made, 0);
  // It no longer goes there itself.
  PinSum(node);
  *copy = made;
  return OkStatus();
}

}  // namespace

Status OrderReads(Graph* graph) {
  // A copy of a reference would be of another moment than its taker's.
  const Status pinned = PinReferenceReads(graph);
  if (!pinned.ok()) return pinned;
  GraphDescription description(*graph);
  if (!description.crosses()) return OkStatus();
  description.FindFeeds();
  const sw_plan_graph view = description.ForPlanner();
  StarOrdersHandle orders;
  ErrorHandle error;
  const sw_code code = sw_star_orders_new(&view, Into(&orders), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  size_t n = 0;
  const sw_star_order* list = sw_star_orders_list(orders.get(), &n);
  std::map<std::pair<uint32_t, int32_t>, Node*> copies;
  FreeNames names(graph);
  for (size_t i = 0; i < n; ++i) {
    Node* first = description.node(list[i].src);
    if (list[i].src_output >= 0) {
      const auto known = copies.emplace(std::make_pair(list[i].src, list[i].src_output), nullptr);
      if (known.second) {
        Status status = CopyForOthers(graph, first, list[i].src_output, &names, &known.first->second);
        if (!status.ok()) return status;
      }
      if (known.first->second != nullptr) first = known.first->second;
    }
    graph->AddControlEdge(first, description.node(list[i].dst));
  }
  return OkStatus();
}

}  // namespace starwire
