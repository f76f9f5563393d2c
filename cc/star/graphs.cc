#include "cc/star/graphs.h"

#include <string>
#include <utility>
#include <vector>

#include "cc/base/status_codec.h"
#include "cc/star/ops.h"
#include "cc/star/rows.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/protobuf/debug.pb.h"

namespace starwire {

using tensorflow::GraphDef;
using tensorflow::NodeDef;

namespace {

bool Called(const NodeDef& node, GraphDef* graph) {
  if (node.op() != kStarCallOp) return false;
  const auto plan = node.attr().find("plan");
  return plan != node.attr().end() && graph->ParseFromString(plan->second.s());
}

// `*` for every node, or one node's name.
bool IsWatched(const std::string& watched, const std::string& name) { return watched == "*" || watched == name; }

Status CheckReplaced(const NodeDef& node, const tensorflow::DebugOptions& options) {
  const auto replaced = node.attr().find(kReplacesAttr);
  if (replaced == node.attr().end()) return OkStatus();
  for (const std::string& name : replaced->second.list().s()) {
    for (const auto& watch : options.debug_tensor_watch_opts()) {
      if (!IsWatched(watch.node_name(), name)) continue;
      return MakeStatus(kUnimplemented,
                        "starwire: a debugger watches " + watch.node_name() + ", but " + node.name() +
                            " does the work of " + name +
                            " with fewer rows: configure this session with starwire.config(star=False)");
    }
  }
  return OkStatus();
}

}  // namespace

Status StarGraphs::Check(const tensorflow::RegisterGraphRequest& request) const {
  if (request.debug_options().debug_tensor_watch_opts_size() == 0) return OkStatus();
  for (const NodeDef& node : request.graph_def().node()) {
    const Status replaced = CheckReplaced(node, request.debug_options());
    if (!replaced.ok()) return replaced;
    GraphDef called;
    if (!Called(node, &called)) continue;
    const auto task = node.attr().find("task");
    const std::string server = task == node.attr().end() ? "another task" : task->second.s();
    for (const NodeDef& inner : called.node()) {
      for (const auto& watch : request.debug_options().debug_tensor_watch_opts()) {
        if (!IsWatched(watch.node_name(), inner.name())) continue;
        return MakeStatus(
            kUnimplemented,
            "starwire: a debugger watches " + watch.node_name() + ", but " + inner.name() + " runs in a star call to " +
                server + ", where a debugger cannot watch it: configure this session with starwire.config(star=False)");
      }
    }
  }
  return OkStatus();
}

void StarGraphs::ShowGraphs(tensorflow::MutableRunGraphResponseWrapper* response) const {
  std::vector<GraphDef> all;
  for (size_t i = 0; i < response->num_partition_graphs(); ++i) {
    for (const NodeDef& node : response->mutable_partition_graph(i)->node()) {
      GraphDef called;
      if (Called(node, &called)) all.push_back(std::move(called));
    }
  }
  for (const GraphDef& graph : all) response->AddPartitionGraph(graph);
}

}  // namespace starwire
