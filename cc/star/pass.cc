#include "cc/star/pass.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "cc/graph/description.h"
#include "cc/graph/operations.h"
#include "cc/graph/reference_reads.h"
#include "cc/star/counters.h"
#include "cc/star/meter.h"
#include "cc/star/rows.h"
#include "cc/star/split.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/public/session_options.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::DeviceNameUtils;
using tensorflow::DeviceSet;
using tensorflow::Graph;
using tensorflow::Node;

// After TensorFlow's own passes and before tensor_fuse, which handles the edges that are left to send and receive.
constexpr int kPhase = 9000;

std::string TaskOf(const std::string& device) {
  std::string task, local;
  DeviceNameUtils::SplitDeviceName(device, &task, &local);
  return task;
}

// By task of the description: 1 for servers.
Status FindServers(const GraphDescription& description, const DeviceSet& devices, const std::string& own,
                   std::vector<uint8_t>* servers) {
  std::vector<std::string> names = description.tasks();
  std::unordered_map<std::string, uint32_t> numbers;
  for (const std::string& name : names) numbers.emplace(name, static_cast<uint32_t>(numbers.size()));
  const auto add = [&](const std::string& name) {
    if (!numbers.emplace(name, static_cast<uint32_t>(names.size())).second) return;
    names.push_back(name);
  };
  add(own);
  for (const tensorflow::Device* device : devices.devices()) add(TaskOf(device->name()));
  std::vector<sw_star_task> tasks;
  for (const std::string& name : names) tasks.push_back({AsBytes(name), 0});
  for (uint32_t node = 0; node < description.num_nodes(); ++node) {
    if (IsVariable(*description.node(node))) tasks[description.task_of(node)].holds_variables = 1;
  }
  servers->assign(tasks.size(), 0);
  ErrorHandle error;
  const sw_code code = sw_star_servers(tasks.data(), tasks.size(), numbers.at(own), servers->data(), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  servers->resize(description.tasks().size());
  return OkStatus();
}

bool CallsFunctions(const Node& node, const tensorflow::FunctionLibraryDefinition* library) {
  if (HasFunctions(node.def())) return true;
  return library != nullptr && library->Contains(node.type_string());
}

// A call runs on one device. A function's body may be on any, and may send and receive by itself.
void LeaveWhatCallsCannot(const std::vector<uint8_t>& servers, const tensorflow::FunctionLibraryDefinition* library,
                          GraphDescription* description) {
  for (uint32_t number = 0; number < description->num_nodes(); ++number) {
    const uint32_t task = description->task_of(number);
    if (servers[task] == 0) continue;
    const Node* node = description->node(number);
    if (node->assigned_device_name() != description->task(task) + "/device:CPU:0" || CallsFunctions(*node, library)) {
      description->LeaveAlone(number);
    }
  }
}

// The number of bytes that is worth a separate call: as the environment says, or as the paths to the servers are.
Status FindSplitBytes(const DeviceSet& devices, const std::vector<uint8_t>& servers, GraphDescription* description,
                      uint64_t* bytes, std::string* path_text) {
  ErrorHandle error;
  const sw_code read = sw_star_split_bytes(bytes, Into(&error));
  if (read != 0) return StatusFromError(read, error);
  if (*bytes != 0) description->FindSizes(/*guess=*/true);
  if (*bytes != SW_SPLIT_MEASURED) return OkStatus();
  *bytes = sw_star_worthwhile_bytes(0, 0);
  if (description->CrossingBytes() < SW_SPLIT_LEAST) return OkStatus();
  std::vector<std::string> tasks;
  for (uint32_t task = 0; task < servers.size(); ++task) {
    if (servers[task] != 0) tasks.push_back(description->task(task));
  }
  const PathMeter::Path path = PathMeter::Narrowest(devices.client_device(), tasks);
  if (path.bytes_per_s == 0) return OkStatus();
  *bytes = sw_star_worthwhile_bytes(path.bytes_per_s, static_cast<uint64_t>(path.round_trip.count()));
  *path_text = ", in parts of " + std::to_string(*bytes >> 10) + " KiB for a path of " +
               std::to_string(path.bytes_per_s * 8 / 1'000'000) + " Mb/s and " +
               std::to_string(path.round_trip.count() / 1000) + " us";
  return OkStatus();
}

// For sessions without calls.
Status Narrow(Graph* graph, const DeviceSet& devices, tensorflow::DataType dtype) {
  if (dtype == tensorflow::DT_INVALID || devices.client_device() == nullptr) return OkStatus();
  NarrowResult result;
  const Status status = NarrowWire(graph, TaskOf(devices.client_device()->name()) + "/device:CPU:0", dtype, &result);
  const std::string text = TextOf(result, dtype);
  if (!text.empty()) LOG(INFO) << "starwire" + text;
  return status;
}

class StarPass : public tensorflow::GraphOptimizationPass {
 public:
  // This is the process of the session's master.
  Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || *options.graph == nullptr || options.session_options == nullptr ||
        options.device_set == nullptr || options.is_function_graph) {
      return OkStatus();
    }
    const StarStyle style = StarStyleOf(options.session_options->config);
    const tensorflow::DataType wire_dtype = WireDtypeOf(options.session_options->config);
    if (style == StarStyle::kNone) return Narrow(options.graph->get(), *options.device_set, wire_dtype);
    const uint64_t start = tensorflow::Env::Default()->NowMicros();
    StarResult result;
    bool touched = false;
    const Status status =
        StarGraph(options.graph->get(), *options.device_set, options.flib_def, style, wire_dtype, &result, &touched);
    const std::string prefix = std::string("starwire: ") + NameOf(style) + ": ";
    if (!status.ok()) {
      if (touched) return status;
      LOG(WARNING) << prefix + "running a graph unchanged: " + StatusMessage(status);
      return OkStatus();
    }
    if (result.summary.empty()) return OkStatus();
    const uint64_t took = tensorflow::Env::Default()->NowMicros() - start;
    LOG(INFO) << prefix + result.summary + " (planned in " + std::to_string(took / 1000) + " ms" + result.path + ")";
    return OkStatus();
  }
};

}  // namespace

Status StarGraph(Graph* graph, const DeviceSet& devices, const tensorflow::FunctionLibraryDefinition* library,
                 StarStyle style, tensorflow::DataType wire_dtype, StarResult* result, bool* touched) {
  *touched = false;
  // Harmless if nothing else follows.
  Status status = PinReferenceReads(graph);
  if (!status.ok()) return status;
  std::vector<uint8_t> servers;
  std::string own;
  {
    const GraphDescription placed(*graph);
    if (!placed.crosses()) return OkStatus();
    if (devices.client_device() == nullptr) {
      return MakeStatus(kInternal, "starwire: the session has no client device");
    }
    own = TaskOf(devices.client_device()->name());
    status = FindServers(placed, devices, own, &servers);
    if (!status.ok()) return status;
    std::vector<std::string> called;
    for (uint32_t task = 0; task < servers.size(); ++task) {
      if (servers[task] != 0) called.push_back(placed.task(task) + "/device:CPU:0");
    }
    status = SendRowsOnce(graph, own + "/device:CPU:0", called, &result->rows);
    if (status.ok() && style == StarStyle::kLite) {
      status = UncoupleCounters(graph, own + "/device:CPU:0", called, &result->counters);
    }
    if (status.ok()) status = NarrowWire(graph, own + "/device:CPU:0", wire_dtype, &result->narrow);
    if (!status.ok()) {
      *touched = true;
      return status;
    }
  }
  GraphDescription description(*graph);
  status = FindServers(description, devices, own, &servers);
  if (!status.ok()) return status;
  LeaveWhatCallsCannot(servers, library, &description);
  description.FindFeeds();
  uint64_t split_bytes = 0;
  status = FindSplitBytes(devices, servers, &description, &split_bytes, &result->path);
  if (!status.ok()) return status;

  const sw_plan_graph view = description.ForPlanner();
  sw_star_options options = {};
  options.struct_size = sizeof(options);
  options.style = style == StarStyle::kLite ? SW_STYLE_LITE : SW_STYLE_ROBUST;
  options.servers = servers.data();
  options.n_tasks = servers.size();
  options.split_bytes = split_bytes;
  ErrorHandle error;
  StarPlanHandle plan;
  const sw_code code = sw_star_plan_new(&view, &options, Into(&plan), Into(&error));
  if (code != 0) return StatusFromError(code, error);
  VLOG(1) << "starwire: " << NameOf(style) << ": " << AsString(sw_star_plan_text(plan.get()));
  result->summary = AsString(sw_star_plan_summary(plan.get()));
  if (result->rows.lookups + result->rows.sums != 0) {
    result->summary += ", the rows of " + std::to_string(result->rows.lookups) + " lookups and " +
                       std::to_string(result->rows.sums) + " gradients cross once";
  }
  if (result->counters != 0) {
    result->summary += ", " + std::to_string(result->counters) + " counters wait for no other server";
  }
  result->summary += TextOf(result->narrow, wire_dtype);

  StarSplit::Options how;
  how.client_device = own + "/device:CPU:0";
  how.incarnation_of = [&devices](const std::string& name, uint64_t* incarnation) {
    const tensorflow::Device* device = devices.FindDeviceByName(name);
    if (device == nullptr) return MakeStatus(kInternal, "starwire: the session has no device " + name);
    *incarnation = device->attributes().incarnation();
    return OkStatus();
  };
  StarSplit split(graph, description, plan.get(), std::move(how));
  result->calls = split.num_calls();
  if (split.num_calls() == 0) return OkStatus();
  status = split.Prepare();
  if (!status.ok()) return status;
  *touched = true;
  return split.Apply();
}

void RegisterStarPass() {
  auto pass = std::make_unique<StarPass>();
  pass->set_name("StarwireStarPass");
  tensorflow::OptimizationPassRegistry::Global()->Register(tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC,
                                                           kPhase, std::move(pass));
}

}  // namespace starwire
