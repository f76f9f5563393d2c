#include "cc/partition/ops.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "cc/base/compat_executor.h"
#include "cc/base/register_kernel.h"
#include "cc/partition/partition.h"
#include "cc/partition/registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {

const char kPartitionOp[] = "StarwirePartition";
const char kPartitionNumberAttr[] = "number";
const char kPartitionNodePrefix[] = "starwire_partition_";

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::Graph;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// The graphs of this process's partitions, by number.
struct Partitions {
  std::mutex mu;
  std::unordered_map<int64_t, std::shared_ptr<const Graph>> graphs;
};

Partitions* AllPartitions() {
  static auto* partitions = new Partitions;
  return partitions;
}

// Stateless in TensorFlow's sense: stateful kernels are kept for the session, but this one lives as long as its graph,
// whose function library it uses.
class PartitionKernel : public AsyncOpKernel {
 public:
  explicit PartitionKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr(kPartitionNumberAttr, &number_));
    Registration* registration = Registration::Current();
    std::unique_ptr<Graph> graph = registration == nullptr ? nullptr : registration->Take(number_);
    tensorflow::FunctionLibraryRuntime* runtime = context->function_library();
    OP_REQUIRES(context, graph != nullptr && runtime != nullptr,
                MakeStatus(kFailedPrecondition, "starwire: " + name() + " is internal to a worker; a graph " +
                                                    "that contains it cannot run"));
    const tensorflow::RegisterGraphRequest& request = registration->request();
    OP_REQUIRES_OK(context,
                   Partition::Compile(runtime, request.session_handle(), request.graph_options().optimizer_options(),
                                      std::move(graph), registration->threads(), &partition_));
    if (!partition_->unsupported().empty()) {
      VLOG(1) << "starwire: TensorFlow's executor runs the partition of " << runtime->device()->name() << ": "
              << partition_->unsupported();
    }
    Partitions* partitions = AllPartitions();
    std::lock_guard<std::mutex> lock(partitions->mu);
    partitions->graphs[number_] = partition_->graph();
  }

  ~PartitionKernel() override {
    Partitions* partitions = AllPartitions();
    std::lock_guard<std::mutex> lock(partitions->mu);
    partitions->graphs.erase(number_);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    partition_->Run(context, [context, done = std::move(done)](const Status& status) {
      if (!status.ok()) context->SetStatus(status);
      done();
    });
  }

 private:
  Int64 number_ = -1;
  std::unique_ptr<Partition> partition_;
};

std::shared_ptr<const Graph> FindPartition(const tensorflow::NodeDef& node) {
  Int64 number = -1;
  if (node.op() != kPartitionOp || !tensorflow::TryGetNodeAttr(node, kPartitionNumberAttr, &number)) return nullptr;
  Partitions* partitions = AllPartitions();
  std::lock_guard<std::mutex> lock(partitions->mu);
  const auto found = partitions->graphs.find(number);
  return found == partitions->graphs.end() ? nullptr : found->second;
}

}  // namespace

void RegisterPartitionOps() {
  tensorflow::OpRegistry::Global()->Register([](tensorflow::OpRegistrationData* data) -> Status {
    tensorflow::OpDefBuilder builder(kPartitionOp);
    return MarkCommunication(&builder)
        .Attr(std::string(kPartitionNumberAttr) + ": int")
        .SetShapeFn(tensorflow::shape_inference::NoOutputs)
        .Doc("Runs a partition of a graph. Workers create this op themselves; a graph cannot contain it.")
        .Finalize(data);
  });
  tensorflow::KernelDefBuilder partition(kPartitionOp);
  RegisterCpuKernel<PartitionKernel>(&partition, "PartitionKernel");
}

void ShowPartition(tensorflow::GraphDef* graph) {
  for (const tensorflow::NodeDef& node : graph->node()) {
    const std::shared_ptr<const Graph> partition = FindPartition(node);
    if (partition == nullptr) continue;
    graph->Clear();
    partition->ToGraphDef(graph);
    return;
  }
}

Status WithoutPartition(const Status& status) {
  if (status.ok()) return status;
  // As tensorflow::AttachDef() writes it: "\n\t [[NAME]]" or "\n\t [[{{node NAME}} …]]".
  const std::string open = "\n\t [[", node = "{{node ";
  const std::string prefix = kPartitionNodePrefix;
  std::string message = StatusMessage(status);
  bool found = false;
  for (size_t at = message.find(open); at != std::string::npos; at = message.find(open, at)) {
    size_t name = at + open.size();
    if (message.compare(name, node.size(), node) == 0) name += node.size();
    const size_t end = message.find("]]", name);
    if (end == std::string::npos) break;
    if (message.compare(name, prefix.size(), prefix) != 0) {
      at = name;
      continue;
    }
    message.erase(at, end + 2 - at);
    found = true;
  }
  return found ? WithMessage(status, message) : status;
}

}  // namespace starwire
