#include "cc/partition/pass.h"

#include <climits>
#include <memory>
#include <utility>

#include "cc/base/compat.h"
#include "cc/base/compat_session.h"
#include "cc/partition/ops.h"
#include "cc/partition/registration.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::Graph;
using tensorflow::Node;
using tensorflow::NodeDef;

constexpr int kLastPhase = INT_MAX;

// For all partitions of a request.
std::string WhyAllStay(const tensorflow::RegisterGraphRequest& request) {
  if (request.graph_options().build_cost_model() > 0) return "the session builds a cost model";
  if (request.debug_options().debug_tensor_watch_opts_size() > 0) return "the session watches its tensors";
  return "";
}

Status Wrap(Registration* registration, const std::string& device, std::unique_ptr<Graph>* partition) {
  auto wrapped = std::make_unique<Graph>(tensorflow::OpRegistry::Global());
  wrapped->set_versions((*partition)->versions());
  const int64_t number = registration->Leave(std::move(*partition));
  NodeDef def;
  def.set_name(kPartitionNodePrefix + std::to_string(number));
  def.set_op(kPartitionOp);
  def.set_device(device);
  tensorflow::AddNodeAttr(kPartitionNumberAttr, Int64{number}, &def);
  Status status;
  Node* node = wrapped->AddNode(std::move(def), &status);
  if (!status.ok()) {
    *partition = registration->Take(number);
    return status;
  }
  node->set_assigned_device_name(device);
  tensorflow::FixupSourceAndSinkEdges(wrapped.get());
  *partition = std::move(wrapped);
  return OkStatus();
}

class PartitionPass : public tensorflow::GraphOptimizationPass {
 public:
  // Runs on the worker for the graphs of sessions, and possibly for functions during their registration.
  Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
    Registration* registration = Registration::Current();
    if (registration == nullptr || options.partition_graphs == nullptr || IsFunctionGraph(options)) return OkStatus();
    const std::string all_stay = WhyAllStay(registration->request());
    for (auto& [device, graph] : *options.partition_graphs) {
      const std::string reason = all_stay.empty() ? WhyPartitionStays(*graph, device) : all_stay;
      if (!reason.empty()) {
        VLOG(1) << "starwire: TensorFlow's executor runs the partition of " << device << ": " << reason;
        continue;
      }
      const Status status = Wrap(registration, device, &graph);
      if (!status.ok()) {
        LOG(WARNING) << "starwire: TensorFlow's executor runs the partition of " << device << ": "
                     << StatusMessage(status);
      }
    }
    return OkStatus();
  }
};

}  // namespace

std::string WhyPartitionStays(const Graph& graph, const std::string& device) {
  tensorflow::DeviceNameUtils::ParsedName name;
  if (!tensorflow::DeviceNameUtils::ParseFullName(device, &name) || name.type != tensorflow::DEVICE_CPU) {
    return "the device is not a CPU";
  }
  for (const Node* node : graph.op_nodes()) {
    if (node->IsEnter() || node->IsExit() || node->IsNextIteration() || node->IsLoopCond()) {
      return "node " + node->name() + " belongs to a loop";
    }
    if (node->attrs().Find("_scoped_allocator") != nullptr) {
      return "node " + node->name() + " shares its buffer with others";
    }
    if (node->IsArg() || node->IsRetval()) return "node " + node->name() + " belongs to a function";
  }
  return "";
}

void RegisterPartitionPass() {
  auto pass = std::make_unique<PartitionPass>();
  pass->set_name("StarwirePartitionPass");
  tensorflow::OptimizationPassRegistry::Global()->Register(tensorflow::OptimizationPassRegistry::POST_PARTITIONING,
                                                           kLastPhase, std::move(pass));
}

}  // namespace starwire
