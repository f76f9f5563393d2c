#include "cc/executor/session_subgraph.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_session.h"
#include "cc/executor/exact_updates.h"
#include "cc/executor/row_gathers.h"
#include "cc/executor/row_updates.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/op_segment.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

using tensorflow::OpKernel;
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

// The sub-graph owns its stateless kernels, and those of inserted operations, whose names several graphs use.
bool BelongsToSession(tensorflow::FunctionLibraryRuntime* runtime, const tensorflow::NodeDef& node) {
  return runtime->IsStateful(node.op()) && node.op()[0] != '_';
}

}  // namespace

Status SessionSubgraph::Register(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                                 const tensorflow::GraphDef& graph, const tensorflow::ConfigProto& config, int threads,
                                 Kernels kernels, std::unique_ptr<SessionSubgraph>* out) {
  std::unique_ptr<SessionSubgraph> subgraph(new SessionSubgraph(std::move(session), handle));
  Status status = subgraph->Build(graph, config, threads, kernels);
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

Status SessionSubgraph::Build(const tensorflow::GraphDef& definition, const tensorflow::ConfigProto& config,
                              int threads, Kernels kernels) {
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
  tensorflow::Graph graph(tensorflow::OpRegistry::Global());
  tensorflow::GraphConstructorOptions options;
  options.allow_internal_ops = true;
  options.expect_device_spec = true;
  status = tensorflow::ConvertGraphDefToGraph(options, definition, &graph);
  if (!status.ok()) return status;
  for (const tensorflow::Node* node : graph.op_nodes()) {
    if (!node->IsArg() && !node->IsRetval()) continue;
    int32_t index = 0;
    status = tensorflow::GetNodeAttr(node->attrs(), "index", &index);
    if (!status.ok()) return status;
    size_t* count = node->IsArg() ? &num_feeds_ : &num_fetches_;
    *count = std::max(*count, static_cast<size_t>(std::max(index, 0)) + 1);
  }

  const bool of_session = kernels == Kernels::kSessions;
  if (of_session) {
    device->op_segment()->AddHold(handle_);
    held_ = device;
  }
  const std::string session = handle_;
  tensorflow::LocalExecutorParams params;
  params.device = device;
  params.function_library = runtime;
  params.create_kernel = [session, of_session, runtime, device](const KernelSource& source, OpKernel** kernel) {
    if (!of_session || !BelongsToSession(runtime, DefOf(source))) {
      const KernelSource own = WithRowGathers(WithRowUpdates(WithExactUpdates(source), device));
      return runtime->CreateKernel(own, kernel);
    }
    auto create = [runtime, device, &source](OpKernel** made) {
      return runtime->CreateKernel(WithRowGathers(WithRowUpdates(source, device)), made);
    };
    return device->op_segment()->FindOrCreate(session, DefOf(source).name(), kernel, create);
  };
  params.delete_kernel = [of_session, runtime](OpKernel* kernel) {
    if (kernel != nullptr && !(of_session && BelongsToSession(runtime, kernel->def()))) delete kernel;
  };
  status = Subgraph::Compile(params, graph, threads, &subgraph_, &unsupported_);
  if (!status.ok() || unsupported_.empty()) return status;
  return NewStockExecutor(params, graph, &stock_);
}

void SessionSubgraph::Run(Step* step) const {
  if (subgraph_ != nullptr) {
    subgraph_->Run(step);
  } else {
    StockRun::Start(stock_.get(), step);
  }
}

}  // namespace starwire
