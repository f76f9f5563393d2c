#include "cc/star/pass.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/base/addition_order.h"
#include "cc/base/compat_session.h"
#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "cc/graph/description.h"
#include "cc/graph/operations.h"
#include "cc/graph/orders.h"
#include "cc/graph/reference_reads.h"
#include "cc/graph/session_mark.h"
#include "cc/star/counters.h"
#include "cc/star/peers.h"
#include "cc/star/rows.h"
#include "cc/star/split.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/graph/algorithm.h"
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

// What a function is given on a server and returns there belongs to the part of the function that runs there, except
// handles. State of a kernel belongs to that part as well: each task that runs the function has its own.
bool BelongsToPart(const Node& node) {
  if (node.IsArg()) return !IsCaptured(node);
  const uint32_t known = KnowledgeOf(node.type_string());
  return node.IsRetval() || (known != 0 && (known & SW_OP_IS_SHAREABLE) == 0);
}

// A call runs on one device. A function's body may be on any, and may send and receive by itself.
void LeaveWhatCallsCannot(const std::vector<uint8_t>& servers, const tensorflow::FunctionLibraryDefinition* library,
                          bool is_function, GraphDescription* description) {
  for (uint32_t number = 0; number < description->num_nodes(); ++number) {
    const uint32_t task = description->task_of(number);
    if (servers[task] == 0) continue;
    const Node* node = description->node(number);
    if (node->assigned_device_name() != description->task(task) + "/device:CPU:0" || CallsFunctions(*node, library) ||
        (is_function && BelongsToPart(*node))) {
      description->LeaveAlone(number);
    }
  }
}

// The order of a sum depends on who else holds the memory of its inputs, which may be that of values before them: any
// operation may return an input's. What calls hand on is held otherwise than in one graph. So whatever of a sum's task
// leads to the sum is either in one call or left to TensorFlow, and so is what takes a sum there that is not `sent` to
// another task. Returns whether there is more to leave than before.
bool LeaveSums(const sw_plan_graph& graph, const sw_star_plan* plan, const std::vector<Node*>& sent,
               GraphDescription* description) {
  const size_t n = description->num_nodes();
  std::vector<uint32_t> open;
  std::vector<bool> seen(n, false);
  for (uint32_t node = 0; node < n; ++node) {
    seen[node] = HasOrder(*description->node(node));
    if (seen[node]) open.push_back(node);
  }
  if (open.empty()) return false;
  const sw_star_way* ways = sw_star_plan_lists(plan).ways;
  std::vector<std::vector<uint32_t>> inputs(n);  // of each node: edges within its task
  bool any = false;
  for (uint32_t at = 0; at < description->num_edges(); ++at) {
    const sw_plan_edge& edge = graph.edges[at];
    if (edge.src_output < 0 || description->task_of(edge.src) != description->task_of(edge.dst)) continue;
    inputs[edge.dst].push_back(at);
    const Node* source = description->node(edge.src);
    const bool takes_sum =
        ways[at].way == SW_WAY_FEED && HasOrder(*source) && std::count(sent.begin(), sent.end(), source) == 0;
    if (takes_sum) any = description->LeaveAlone(edge.dst) || any;
  }
  while (!open.empty()) {
    const uint32_t node = open.back();
    open.pop_back();
    for (const uint32_t at : inputs[node]) {
      const uint32_t source = graph.edges[at].src;
      switch (ways[at].way) {
        case SW_WAY_FETCH:
          any = description->LeaveAlone(source) || any;
          break;
        case SW_WAY_FEED:
        case SW_WAY_SLOT:
        case SW_WAY_DIRECT:
        case SW_WAY_RELAY:
          any = description->LeaveAlone(node) || any;
          break;
        default:
          break;
      }
      if (!seen[source]) open.push_back(source);
      seen[source] = true;
    }
  }
  return any;
}

// Pins the sums that were sent to other tasks, but for those that TensorFlow will still send.
void PinTaken(const sw_plan_graph& graph, const sw_star_plan* plan, const std::vector<Node*>& sent,
              const GraphDescription& description) {
  const sw_star_way* ways = sw_star_plan_lists(plan).ways;
  std::set<const Node*> left;
  for (uint32_t at = 0; at < description.num_edges(); ++at) {
    const sw_plan_edge& edge = graph.edges[at];
    const bool crosses = edge.src_output >= 0 && description.task_of(edge.src) != description.task_of(edge.dst);
    if (crosses && ways[at].way == SW_WAY_UNTOUCHED) left.insert(description.node(edge.src));
  }
  for (Node* sum : sent) {
    if (left.count(sum) == 0) PinSum(sum);
  }
}

// The number of bytes that is worth a separate call: as the environment says, or as the paths to the servers are.
Status FindSplitBytes(const std::string& own, const std::vector<uint8_t>& servers, GraphDescription* description,
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
  const StarPeers::Path path = StarPeers::Narrowest(own, tasks);
  if (path.bytes_per_s == 0) return OkStatus();
  *bytes = sw_star_worthwhile_bytes(path.bytes_per_s, static_cast<uint64_t>(path.round_trip.count()));
  *path_text = ", in parts of " + std::to_string(*bytes >> 10) + " KiB for a path of " +
               std::to_string(path.bytes_per_s * 8 / 1'000'000) + " Mb/s and " +
               std::to_string(path.round_trip.count() / 1000) + " us";
  return OkStatus();
}

// The servers that cannot find a function's handles.
std::set<std::string> AskServers(const GraphDescription& description, const std::string& own,
                                 const std::vector<uint8_t>& servers) {
  std::vector<std::string> asked;
  for (uint32_t task = 0; task < servers.size(); ++task) {
    if (servers[task] != 0) asked.push_back(description.task(task));
  }
  const std::vector<bool> answers = StarPeers::TakeHandles(own, asked);
  std::set<std::string> unable;
  for (size_t i = 0; i < asked.size(); ++i) {
    if (!answers[i]) unable.insert(asked[i]);
  }
  return unable;
}

void Exclude(const GraphDescription& description, const std::set<std::string>& tasks, std::vector<uint8_t>* servers) {
  for (uint32_t task = 0; task < servers->size(); ++task) {
    if (tasks.count(description.task(task)) != 0) (*servers)[task] = 0;
  }
}

// Where a function is called.
std::string CallingTask(const tensorflow::GraphOptimizationPassOptions& options) {
  const tensorflow::Device* called = DefaultDeviceOf(options);
  if (called != nullptr && called->IsLocal()) {
    return TaskOf(called->name());
  }
  for (const tensorflow::Device* device : options.device_set->devices()) {
    if (device->IsLocal()) return TaskOf(device->name());
  }
  return std::string();
}

bool IsUnreadHandle(const Node& node) {
  const auto read = [](const tensorflow::Edge* edge) { return !edge->dst()->IsSink(); };
  return node.type_string() == "Identity" && node.output_type(0) == tensorflow::DT_RESOURCE &&
         std::none_of(node.out_edges().begin(), node.out_edges().end(), read);
}

// Functions that were inlined leave copies of handles that nobody reads, and for which nobody waits. In a loop, their
// server would have to be told of each iteration.
void DropUnreadHandles(Graph* graph) {
  std::vector<Node*> unread;
  do {
    unread.clear();
    for (Node* node : graph->op_nodes()) {
      if (IsUnreadHandle(*node)) unread.push_back(node);
    }
    for (Node* node : unread) graph->RemoveNode(node);
  } while (!unread.empty());
  tensorflow::FixupSourceAndSinkEdges(graph);
}

// What sessions without calls get as well.
void Order(Graph* graph) {
  const Status status = OrderReads(graph);
  if (!status.ok()) LOG(WARNING) << "starwire: running a graph unchanged: " + StatusMessage(status);
}

Status Narrow(Graph* graph, const DeviceSet& devices, tensorflow::DataType dtype) {
  if (dtype == tensorflow::DT_INVALID || devices.client_device() == nullptr) return OkStatus();
  WireDtypeResult result;
  const Status status =
      ApplyWireDtype(graph, TaskOf(devices.client_device()->name()) + "/device:CPU:0", dtype, &result);
  const std::string text = TextOf(result, dtype);
  if (!text.empty()) LOG(INFO) << "starwire" + text;
  return status;
}

class StarPass : public tensorflow::GraphOptimizationPass {
 public:
  // This is the process of the session's master, or of the task that calls the function. The parts of a function that
  // other tasks run do not come here again.
  Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || *options.graph == nullptr || options.session_options == nullptr ||
        options.device_set == nullptr) {
      return OkStatus();
    }
    const tensorflow::ConfigProto& config = options.session_options->config;
    StarCaller caller;
    caller.is_function = IsFunctionGraph(options);
    caller.style = caller.is_function ? FunctionStyleOf(config) : StarStyleOf(config);
    if (caller.style != StarStyle::kNone || IsMarked(config)) {
      if (const Status loaded = LoadOperations(); !loaded.ok()) return loaded;
    }
    const tensorflow::DataType wire_dtype = caller.is_function ? tensorflow::DT_INVALID : WireDtypeOf(config);
    if (caller.style == StarStyle::kNone) {
      if (!caller.is_function && IsMarked(config)) Order(options.graph->get());
      return Narrow(options.graph->get(), *options.device_set, wire_dtype);
    }
    if (caller.is_function) {
      caller.task = CallingTask(options);
    } else if (const tensorflow::Device* client = options.device_set->client_device()) {
      caller.task = TaskOf(client->name());
    }
    const uint64_t start = tensorflow::Env::Default()->NowMicros();
    StarResult result;
    bool touched = false;
    const Status status =
        StarGraph(options.graph->get(), *options.device_set, options.flib_def, caller, wire_dtype, &result, &touched);
    const std::string prefix = std::string("starwire: ") + NameOf(caller.style) + ": ";
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
                 const StarCaller& caller, tensorflow::DataType wire_dtype, StarResult* result, bool* touched) {
  *touched = false;
  // Harmless if nothing else follows.
  Status status = PinReferenceReads(graph);
  if (!status.ok()) return status;
  const std::vector<Node*> sent = SentSums(*graph);
  if (caller.is_function) DropUnreadHandles(graph);
  std::vector<uint8_t> servers;
  std::set<std::string> unable;
  const std::string& own = caller.task;
  {
    const GraphDescription placed(*graph);
    if (!placed.crosses()) return OkStatus();
    if (own.empty()) return MakeStatus(kInternal, "starwire: the session has no client device");
    status = FindServers(placed, devices, own, &servers);
    if (!status.ok()) return status;
    if (caller.is_function) unable = AskServers(placed, own, servers);
    Exclude(placed, unable, &servers);
    std::vector<std::string> called;
    for (uint32_t task = 0; task < servers.size(); ++task) {
      if (servers[task] != 0) called.push_back(placed.task(task) + "/device:CPU:0");
    }
    status = SendRowsOnce(graph, own + "/device:CPU:0", called, &result->rows);
    // In a function, another handle may be that of the counter.
    if (status.ok() && caller.style == StarStyle::kLite && !caller.is_function) {
      status = UncoupleCounters(graph, own + "/device:CPU:0", called, &result->counters);
    }
    if (status.ok()) status = ApplyWireDtype(graph, own + "/device:CPU:0", wire_dtype, &result->narrow);
    if (!status.ok()) {
      *touched = true;
      return status;
    }
  }
  // In functions, edges order whatever uses one variable.
  if (!caller.is_function) {
    status = OrderReads(graph);
    if (!status.ok()) return status;
  }
  GraphDescription description(*graph);
  status = FindServers(description, devices, own, &servers);
  if (!status.ok()) return status;
  Exclude(description, unable, &servers);
  LeaveWhatCallsCannot(servers, library, caller.is_function, &description);
  description.FindFeeds();
  uint64_t split_bytes = 0;
  status = FindSplitBytes(own, servers, &description, &split_bytes, &result->path);
  if (!status.ok()) return status;

  sw_star_options options = {};
  options.struct_size = sizeof(options);
  options.lite = caller.style == StarStyle::kLite ? 1 : 0;
  options.servers = servers.data();
  options.n_tasks = servers.size();
  options.split_bytes = split_bytes;
  StarPlanHandle plan;
  sw_plan_graph view;
  do {
    view = description.ForPlanner();
    ErrorHandle error;
    const sw_code code = sw_star_plan_new(&view, &options, Into(&plan), Into(&error));
    if (code != 0) return StatusFromError(code, error);
  } while (LeaveSums(view, plan.get(), sent, &description));
  PinTaken(view, plan.get(), sent, description);
  VLOG(1) << "starwire: " << NameOf(caller.style) << ": " << AsString(sw_star_plan_text(plan.get()));
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
  static std::atomic<uint64_t> functions{0};
  if (caller.is_function) how.function = std::to_string(functions.fetch_add(1));
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
