#include "cc/partition/partition.h"

#include <memory>
#include <optional>
#include <utility>

#include "cc/base/compat_executor.h"
#include "cc/executor/kernel_params.h"
#include "cc/graph/operations.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/graph_optimizer.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/platform/env.h"

namespace starwire {

using tensorflow::CancellationManager;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

namespace {

// A run gets the arguments that the kernel of the whole partition got.
void CopyArgs(OpKernelContext* context, CancellationManager* cancellation, RunArgs* args) {
  args->step_id = context->step_id();
  args->rendezvous = context->rendezvous();
  args->stats_collector = context->stats_collector();
  args->cancellation_manager = cancellation;
  args->session_state = context->session_state();
  args->session_handle = context->session_handle();
  args->tensor_store = context->tensor_store();
  args->step_container = context->step_container();
  args->collective_executor = context->collective_executor();
  PassRunMembers(*context, args);
  // A copy: the threads of a dataset's iterator keep it beyond the step.
  args->runner = *context->runner();
}

class PartitionRun : public Step {
 public:
  PartitionRun(OpKernelContext* context, std::function<void(const Status&)> done) : done_(std::move(done)) {
    // A separate manager: a failure cancels the rest of the partition, and the executor around it, which learns of the
    // failure later, can tell it from a cancellation from outside.
    CancellationManager* whole = context->cancellation_manager();
    if (whole != nullptr) cancellation_.emplace(whole);
    CopyArgs(context, whole == nullptr ? nullptr : cancellation_->get(), &args);
    goes_on_elsewhere = true;
  }

  // Deletes itself.
  void OnDone(const Status& status) override {
    const Status outcome = status;
    auto done = std::move(done_);
    delete this;
    done(outcome);
  }

 private:
  std::function<void(const Status&)> done_;
  std::optional<LinkedCancellation> cancellation_;
};

}  // namespace

Status Partition::Compile(FunctionLibraryRuntime* runtime, const std::string& session,
                          const tensorflow::OptimizerOptions& optimizer, std::unique_ptr<tensorflow::Graph> graph,
                          int threads, std::unique_ptr<Partition>* out) {
  std::unique_ptr<Partition> partition(new Partition);
  tensorflow::GraphOptimizer(optimizer).Optimize(runtime, tensorflow::Env::Default(), runtime->device(), &graph,
                                                 tensorflow::GraphOptimizer::Options());
  partition->graph_ = std::move(graph);
  tensorflow::LocalExecutorParams params = KernelParams(runtime, session, KernelOwner::kSession);
  // A thread that waits within a kernel cannot run the kernel that it waits for. TensorFlow's executor gives each its
  // own thread. Known asynchronous kernels do not occupy a thread.
  std::string waits;
  tensorflow::LocalExecutorParams watched = params;
  watched.create_kernel = [&params, &waits](const KernelSource& source, OpKernel** kernel) {
    Status status = params.create_kernel(source, kernel);
    const tensorflow::NodeDef& node = DefOf(source);
    const bool may_hold = status.ok() && (*kernel)->AsAsync() == nullptr && MayWait(node);
    if (may_hold || KnowledgeOf(node.op()) == 0) waits = node.name();
    return status;
  };
  std::unique_ptr<Subgraph> subgraph;
  Status status = Subgraph::Compile(watched, *partition->graph_, threads, &subgraph, &partition->unsupported_);
  if (!status.ok()) return status;
  if (partition->unsupported_.empty() && !waits.empty()) {
    partition->unsupported_ = "node " + waits + " may block while its kernel runs";
    subgraph.reset();
  }
  partition->subgraph_ = std::move(subgraph);
  if (!partition->unsupported_.empty()) {
    status = NewStockExecutor(params, *partition->graph_, &partition->stock_);
  }
  if (status.ok()) *out = std::move(partition);
  return status;
}

void Partition::Run(OpKernelContext* context, std::function<void(const Status&)> done) const {
  if (subgraph_ != nullptr) {
    subgraph_->Run(new PartitionRun(context, std::move(done)));
    return;
  }
  RunArgs args;
  CopyArgs(context, context->cancellation_manager(), &args);
  stock_->RunAsync(args, std::move(done));
}

}  // namespace starwire
