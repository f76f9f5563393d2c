#include "cc/star/plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_set>
#include <utility>

#include "cc/graph/operations.h"
#include "cc/star/kernel_state.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

const char kHandleAttr[] = "_starwire_handle";

namespace {

bool EndsAlone(const tensorflow::NodeDef& node) {
  return (KnowledgeOf(node.op()) & (SW_OP_KNOWN | SW_OP_WAITS)) == SW_OP_KNOWN && !HasFunctions(node);
}

bool MayHaveEffects(const tensorflow::NodeDef& node) {
  if (node.op() == "_Arg" || node.op() == "_Retval") return false;
  const uint32_t known = KnowledgeOf(node.op());
  const bool only_forwards = (known & (SW_OP_FORWARDS | SW_OP_UPDATES)) == SW_OP_FORWARDS;
  const bool only_computes = (known & (SW_OP_IS_PURE | SW_OP_IS_VARIABLE | SW_OP_READS)) != 0;
  return HasFunctions(node) || !(only_forwards || only_computes);
}

// Checks that they are the last feeds.
Status CountHandles(const tensorflow::GraphDef& graph, size_t num_feeds, size_t* count) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const tensorflow::NodeDef& node : graph.node()) {
    if (node.op() != "_Arg" || node.attr().count(kHandleAttr) == 0) continue;
    ++*count;
    const auto index = node.attr().find("index");
    if (index != node.attr().end()) first = std::min(first, index->second.i());
  }
  if (*count == 0 || (*count <= num_feeds && first == static_cast<int64_t>(num_feeds - *count))) return OkStatus();
  return MakeStatus(kInvalidArgument, "starwire: a registered plan has handles in front of other feeds");
}

}  // namespace

Status StarPlan::Compile(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                         const tensorflow::GraphDef& graph, bool has_state, int threads, Census census,
                         std::shared_ptr<ServerQueues> queues, StarPlan** out) {
  tensorflow::Device* device = nullptr;
  if (graph.node_size() > 0) {
    Status status = session->device_mgr()->LookupDevice(graph.node(0).device(), &device);
    if (!status.ok()) return status;
    if (device->device_type() != tensorflow::DEVICE_CPU) {
      return MakeStatus(kInvalidArgument,
                        "starwire: a plan for device " + device->name() + " was registered: star calls run on CPUs");
    }
  }
  StarPlan* plan = new StarPlan;
  plan->session_ = session;
  plan->census_ = std::move(census);
  plan->queues_ = std::move(queues);
  plan->census_->fetch_add(1);
  // State that is found by name needs no kernel of the session.
  const auto owner = has_state ? KernelOwner::kSession : KernelOwner::kSubgraph;
  Status status = SessionSubgraph::Register(std::move(session), handle, graph, tensorflow::ConfigProto(), threads,
                                            owner, &plan->subgraph_);
  if (status.ok()) status = CountHandles(graph, plan->subgraph_->num_feeds(), &plan->num_handles_);
  if (!status.ok()) {
    delete plan;
    return status;
  }
  plan->may_wait_ = plan->subgraph_->is_async();
  plan->ends_alone_ = !plan->subgraph_->is_async();
  std::unordered_set<std::string> constants;
  for (const tensorflow::NodeDef& node : graph.node()) {
    if (node.op() == "Const") constants.insert(node.name());
  }
  const auto is_constant = [&constants](const std::string& name) { return constants.count(name) != 0; };
  for (const tensorflow::NodeDef& node : graph.node()) {
    plan->may_wait_ = plan->may_wait_ || !IsLinear(node, is_constant);
    plan->ends_alone_ = plan->ends_alone_ && EndsAlone(node);
    plan->has_effects_ = plan->has_effects_ || MayHaveEffects(node);
  }
  plan->needs_rendezvous_ = CallsFunctions(graph);
  plan->needs_container_ = has_state || plan->needs_rendezvous_;
  *out = plan;
  return OkStatus();
}

StarPlan::~StarPlan() {
  subgraph_.reset();
  session_.reset();
  census_->fetch_sub(1);
}

void StarPlan::Retire() {
  const std::shared_ptr<ServerQueues> queues = queues_;
  queues->slow.Run([this] { delete this; });
}

}  // namespace starwire
