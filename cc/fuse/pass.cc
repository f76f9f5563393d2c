#include "cc/fuse/pass.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/addition_order.h"
#include "cc/base/compat_session.h"
#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "cc/fuse/ops.h"
#include "cc/fuse/switch.h"
#include "cc/graph/description.h"
#include "cc/graph/names.h"
#include "cc/graph/operations.h"
#include "cc/graph/orders.h"
#include "cc/graph/reference_reads.h"
#include "cc/graph/session_mark.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::DataType;
using tensorflow::DeviceNameUtils;
using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;
using tensorflow::NodeDef;

// After TensorFlow's own passes, which replicate constants and lower functions.
constexpr int kPhase = 10000;

// A group, and its insertion into the graph.
class Group {
 public:
  Group(const GraphDescription& description, const sw_fuse_group& group) : description_(description), group_(group) {}

  // Checks the group before anything is changed.
  Status Prepare(const tensorflow::DeviceSet* devices) {
    Status status = HostOf(group_.src_task, devices, &source_device_);
    if (status.ok()) status = HostOf(group_.dst_task, devices, &destination_device_);
    if (!status.ok()) return status;
    for (size_t i = 0; i < group_.n_items; ++i) {
      const sw_fuse_item& item = group_.items[i];
      if (item.src_output < 0) continue;
      const Node* source = description_.node(item.src);
      types_.push_back(tensorflow::BaseType(source->output_type(item.src_output)));
      members_.push_back(source->name() + ":" + std::to_string(item.src_output));
    }
    return OkStatus();
  }

  Status Insert(Graph* graph) const {
    Node* first = nullptr;
    Node* last = nullptr;
    // A group of control edges carries no data: TensorFlow sends the control edge between the two nodes.
    const bool carries = !types_.empty();
    Status status = AddNode(graph, carries ? kFuseOp : "NoOp", "fuse", source_device_, &first);
    if (!status.ok()) return status;
    status = AddNode(graph, carries ? kUnfuseOp : "NoOp", "unfuse", destination_device_, &last);
    if (!status.ok()) {
      graph->RemoveNode(first);
      return status;
    }
    if (carries) {
      graph->AddEdge(first, 0, last, 0);
    } else {
      graph->AddControlEdge(first, last);
    }
    int slot = 0;
    for (size_t i = 0; i < group_.n_items; ++i) {
      const sw_fuse_item& item = group_.items[i];
      Node* source = description_.node(item.src);
      const bool is_control = item.src_output < 0;
      if (is_control) {
        graph->AddControlEdge(source, first);
      } else {
        graph->AddEdge(source, item.src_output, first, slot);
      }
      for (size_t j = 0; j < item.n_edges; ++j) {
        const Edge* edge = description_.edge(item.edges[j]);
        Node* consumer = edge->dst();
        const int input = edge->dst_input();
        if (is_control) {
          graph->RemoveControlEdge(edge);
          graph->AddControlEdge(last, consumer);
        } else {
          graph->RemoveEdge(edge);
          graph->AddEdge(last, slot, consumer, input);
        }
      }
      if (!is_control) ++slot;
    }
    return OkStatus();
  }

  size_t size() const { return group_.n_items; }

 private:
  // The first CPU of the task: tensors are fused in host memory.
  Status HostOf(uint32_t task, const tensorflow::DeviceSet* devices, std::string* device) const {
    *device = description_.task(task) + "/device:CPU:0";
    if (devices == nullptr || devices->FindDeviceByName(*device) != nullptr) return OkStatus();
    return MakeStatus(kInternal, "the session has no device " + *device);
  }

  Status AddNode(Graph* graph, const char* op, const char* what, const std::string& device, Node** out) const {
    NodeDef def;
    def.set_name(NumberedName(what) + "_of_" + std::to_string(group_.n_items));
    def.set_op(op);
    def.set_device(device);
    if (!types_.empty()) {
      tensorflow::AddNodeAttr("T", tensorflow::DataTypeVector(types_.begin(), types_.end()), &def);
      tensorflow::AddNodeAttr(kMembersAttr, members_, &def);
    }
    Status status;
    *out = graph->AddNode(std::move(def), &status);
    if (status.ok()) (*out)->set_assigned_device_name(device);
    return status;
  }

  const GraphDescription& description_;
  const sw_fuse_group& group_;
  std::string source_device_, destination_device_;
  std::vector<DataType> types_;
  std::vector<std::string> members_;
};

class FusePass : public tensorflow::GraphOptimizationPass {
 public:
  // Runs in the process of the session's master, or of the task that calls the function. The parts of a function that
  // other tasks run do not come here again.
  Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || *options.graph == nullptr || options.session_options == nullptr ||
        options.device_set == nullptr) {
      return OkStatus();
    }
    // Most functions are local.
    if (IsFunctionGraph(options) && IsLocal(*options.device_set)) return OkStatus();
    const std::string task = IsFunctionGraph(options) ? CallingTask(options) : ClientTask(*options.device_set);
    bool on = false;
    Status status = ReadFuseSettings(options.session_options->config, task,
                                     IsFunctionGraph(options) ? FuseScope::kFunction : FuseScope::kSession, &on);
    if (!status.ok() || !on) return status;
    if (status = LoadOperations(); !status.ok()) return status;
    const uint64_t start = tensorflow::Env::Default()->NowMicros();
    FuseResult result;
    // Of a server of TensorFlow's.
    const bool is_stock = !IsFunctionGraph(options) && !IsMarked(options.session_options->config);
    if (is_stock) status = OrderReads(options.graph->get());
    if (status.ok()) status = FuseGraph(options.graph->get(), options.device_set, &result);
    if (!status.ok()) {
      LOG(WARNING) << "starwire: tensor_fuse: running a graph unchanged: " << StatusMessage(status);
      return OkStatus();
    }
    if (result.crossings == 0) return OkStatus();
    const uint64_t took = tensorflow::Env::Default()->NowMicros() - start;
    // As text: not every version of TensorFlow exports the functions that log numbers.
    LOG(INFO) << "starwire: tensor_fuse: " + Describe(result) + " (planned in " + std::to_string(took / 1000) + " ms)";
    return OkStatus();
  }

 private:
  static std::string Describe(const FuseResult& result) {
    const std::string crossings = std::to_string(result.crossings);
    return crossings + " edges between tasks, " + std::to_string(result.fused) + " of them in " +
           std::to_string(result.groups) + " groups: " + std::to_string(result.Messages()) +
           " messages per step instead of " + crossings;
  }

  static std::string TaskOf(const tensorflow::Device* device) {
    std::string task, local;
    if (device != nullptr) DeviceNameUtils::SplitDeviceName(device->name(), &task, &local);
    return task;
  }

  static std::string ClientTask(const tensorflow::DeviceSet& devices) { return TaskOf(devices.client_device()); }

  static bool IsLocal(const tensorflow::DeviceSet& devices) {
    return std::all_of(devices.devices().begin(), devices.devices().end(),
                       [](const tensorflow::Device* device) { return device->IsLocal(); });
  }

  // Functions have no client device.
  static std::string CallingTask(const tensorflow::GraphOptimizationPassOptions& options) {
    const tensorflow::Device* called = DefaultDeviceOf(options);
    if (called != nullptr && called->IsLocal()) {
      return TaskOf(called);
    }
    for (const tensorflow::Device* device : options.device_set->devices()) {
      if (device->IsLocal()) return TaskOf(device);
    }
    return std::string();
  }
};

}  // namespace

Status FuseGraph(Graph* graph, const tensorflow::DeviceSet* devices, FuseResult* result) {
  // Harmless if nothing is fused afterwards.
  Status pinned = PinReferenceReads(graph);
  if (!pinned.ok()) return pinned;
  const std::vector<Node*> sums = SentSums(*graph);
  GraphDescription description(*graph);
  if (!description.crosses()) return OkStatus();
  description.FindSizes(/*guess=*/false);
  description.FindFeeds();
  const sw_plan_graph view = description.ForPlanner();
  FusePlanHandle plan;
  ErrorHandle error;
  const sw_code code = sw_fuse_plan_new(&view, Into(&plan), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  VLOG(1) << "starwire: tensor_fuse: " << AsString(sw_fuse_plan_text(plan.get()));
  result->crossings = sw_fuse_plan_crossings(plan.get());

  size_t n = 0;
  const sw_fuse_group* all = sw_fuse_plan_groups(plan.get(), &n);
  std::vector<Group> groups;
  for (size_t i = 0; i < n; ++i) {
    groups.emplace_back(description, all[i]);
    Status status = groups.back().Prepare(devices);
    if (!status.ok()) return status;
  }
  for (const Group& group : groups) {
    Status status = group.Insert(graph);
    if (!status.ok()) return status;
    result->fused += group.size();
    ++result->groups;
  }
  for (Node* sum : sums) {
    if (!IsSent(*sum)) PinSum(sum);
  }
  if (n != 0) tensorflow::FixupSourceAndSinkEdges(graph);
  return OkStatus();
}

void RegisterFusePass() {
  auto pass = std::make_unique<FusePass>();
  pass->set_name("StarwireFusePass");
  tensorflow::OptimizationPassRegistry::Global()->Register(tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC,
                                                           kPhase, std::move(pass));
}

}  // namespace starwire
