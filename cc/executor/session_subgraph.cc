#include "cc/executor/session_subgraph.h"

#include <utility>
#include <vector>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_session.h"
#include "cc/base/status_codec.h"
#include "cc/executor/kernel_params.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_segment.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

using tensorflow::Tensor;

namespace {

// Passes a step's feeds and fetches to TensorFlow's executor. Deletes itself when the run is over.
class StockRun : public tensorflow::CallFrameInterface {
 public:
  static void Start(tensorflow::Executor* executor, Step* step) {
    auto* run = new StockRun(step);
    step->args.call_frame = run;
    executor->RunAsync(step->args, [run](const Status& status) {
      Step* step = run->step_;
      delete run;
      step->args.call_frame = nullptr;
      for (Tensor& feed : step->feeds) feed = Tensor();
      step->OnDone(status);
    });
  }
  size_t num_args() const override { return step_->feeds.size(); }
  size_t num_retvals() const override { return step_->fetches.size(); }
  // Without `override`: only the second in 1.15, only the first later.
  Status GetArg(int index, const Tensor** value) {
    if (index < 0 || static_cast<size_t>(index) >= step_->feeds.size()) return Missing("argument", index);
    *value = &step_->feeds[index];
    return OkStatus();
  }
  Status GetArg(int index, Tensor* value) const {
    if (index < 0 || static_cast<size_t>(index) >= step_->feeds.size()) return Missing("argument", index);
    *value = step_->feeds[index];
    return OkStatus();
  }
  Status SetRetval(int index, const Tensor& value) override {
    if (index < 0 || static_cast<size_t>(index) >= step_->fetches.size()) return Missing("result", index);
    step_->fetches[index].tensor = value;
    step_->fetches[index].dead = false;
    return OkStatus();
  }

 private:
  explicit StockRun(Step* step) : step_(step) {
    for (Step::Value& fetch : step->fetches) fetch.dead = true;
  }
  static Status Missing(const char* what, int index) {
    return MakeStatus(kInvalidArgument,
                      std::string("starwire: no place for ") + what + " " + std::to_string(index) + " of a sub-graph");
  }
  Step* const step_;
};

// TensorFlow's worker replaces some operations, by those of oneDNN for example, whose kernels round otherwise.
Status Rewrite(const std::string& device, tensorflow::FunctionLibraryDefinition* library,
               std::unique_ptr<tensorflow::Graph>* graph) {
  std::unordered_map<std::string, std::unique_ptr<tensorflow::Graph>> partitions;
  partitions[device] = std::move(*graph);
  tensorflow::GraphOptimizationPassOptions options;
  options.flib_def = library;
  options.partition_graphs = &partitions;
  Status status = tensorflow::OptimizationPassRegistry::Global()->RunGrouping(
      tensorflow::OptimizationPassRegistry::POST_PARTITIONING, options);
  *graph = std::move(partitions[device]);
  return status;
}

}  // namespace

Status SessionSubgraph::Register(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                                 const tensorflow::GraphDef& graph, const tensorflow::ConfigProto& config, int threads,
                                 KernelOwner owner, std::unique_ptr<SessionSubgraph>* out) {
  std::unique_ptr<SessionSubgraph> subgraph(new SessionSubgraph(std::move(session), handle));
  Status status = subgraph->Build(graph, config, threads, owner);
  if (status.ok()) *out = std::move(subgraph);
  return status;
}

SessionSubgraph::~SessionSubgraph() {
  // Destroy kernels before releasing the hold on them.
  subgraph_.reset();
  stock_.reset();
  if (held_ != nullptr) held_->op_segment()->RemoveHold(handle_);
}

Status SessionSubgraph::FindDevice(const tensorflow::GraphDef& graph, tensorflow::Device** device) const {
  const std::string* name = nullptr;
  for (const tensorflow::NodeDef& node : graph.node()) {
    if (name != nullptr && node.device() != *name) {
      return MakeStatus(kInvalidArgument,
                        "starwire: a sub-graph spans two devices: " + *name + " and " + node.device());
    }
    name = &node.device();
  }
  if (name == nullptr) return MakeStatus(kInvalidArgument, "starwire: a sub-graph without nodes was registered");
  return session_->device_mgr()->LookupDevice(*name, device);
}

// The numbers of a graph's arguments and results need not be all there, but there are not more of them than nodes, and
// no two are the same: only one argument would get the value, and two threads could write one result.
Status SessionSubgraph::CountValues(const tensorflow::Graph& graph) {
  std::vector<bool> feeds;
  std::vector<bool> fetches;
  for (const tensorflow::Node* node : graph.op_nodes()) {
    if (!node->IsArg() && !node->IsRetval()) continue;
    int32_t index = 0;
    Status status = tensorflow::GetNodeAttr(node->attrs(), "index", &index);
    if (status.ok() && (index < 0 || index >= graph.num_op_nodes())) {
      status = MakeStatus(kInvalidArgument, "starwire: node " + node->name() + " of a sub-graph of " +
                                                std::to_string(graph.num_op_nodes()) + " nodes has index " +
                                                std::to_string(index));
    }
    if (!status.ok()) return status;
    std::vector<bool>* numbers = node->IsArg() ? &feeds : &fetches;
    const size_t number = static_cast<size_t>(index);
    if (numbers->size() <= number) numbers->resize(number + 1);
    if ((*numbers)[number]) {
      return MakeStatus(kInvalidArgument, "starwire: node " + node->name() + " of a sub-graph has index " +
                                              std::to_string(index) + ", as another one has");
    }
    (*numbers)[number] = true;
  }
  num_feeds_ = feeds.size();
  num_fetches_ = fetches.size();
  return OkStatus();
}

Status SessionSubgraph::Build(const tensorflow::GraphDef& definition, const tensorflow::ConfigProto& config,
                              int threads, KernelOwner owner) {
  tensorflow::Device* device = nullptr;
  Status status = FindDevice(definition, &device);
  if (!status.ok()) return status;
  library_ =
      std::make_unique<tensorflow::FunctionLibraryDefinition>(tensorflow::OpRegistry::Global(), definition.library());
  runtime_ = NewRuntime(session_->device_mgr(), config, definition.versions().producer(), library_.get(),
                        ClusterOf(session_.get()));
  tensorflow::FunctionLibraryRuntime* runtime = runtime_->GetFLR(device->name());
  if (runtime == nullptr)
    return MakeStatus(kInternal, "starwire: device " + device->name() + " has no function library");

  // Conversion adds the functions along with the nodes.
  auto graph = std::make_unique<tensorflow::Graph>(tensorflow::OpRegistry::Global());
  tensorflow::GraphConstructorOptions options;
  options.allow_internal_ops = true;
  options.expect_device_spec = true;
  status = tensorflow::ConvertGraphDefToGraph(options, definition, graph.get());
  if (status.ok()) status = CountValues(*graph);
  if (status.ok()) status = Rewrite(device->name(), library_.get(), &graph);
  if (!status.ok()) return status;

  if (owner == KernelOwner::kSession) {
    device->op_segment()->AddHold(handle_);
    held_ = device;
  }
  const tensorflow::LocalExecutorParams params = KernelParams(runtime, handle_, owner);
  status = Subgraph::Compile(params, *graph, threads, &subgraph_, &unsupported_);
  if (!status.ok() || unsupported_.empty()) return status;
  return NewStockExecutor(params, *graph, &stock_);
}

void SessionSubgraph::Run(Step* step) const {
  if (subgraph_ != nullptr) {
    subgraph_->Run(step);
  } else {
    StockRun::Start(stock_.get(), step);
  }
}

}  // namespace starwire
