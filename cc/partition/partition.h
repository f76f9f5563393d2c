// A partition of a session's graph in TensorFlow's worker. It runs on the lock-free executor, with the step, the
// rendezvous and the function library that TensorFlow's executor would have. One that this executor does not support
// runs on TensorFlow's.
#ifndef STARWIRE_CC_PARTITION_PARTITION_H_
#define STARWIRE_CC_PARTITION_PARTITION_H_

#include <functional>
#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "cc/executor/subgraph.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

class Partition {
 public:
  // `runtime` is the graph's runtime for the partition's device; it holds the session's kernels as long as this object
  // lives. `session` is the key under which the device keeps stateful kernels. The graph is optimized as TensorFlow
  // would. `threads`: how many may work on one run.
  static Status Compile(tensorflow::FunctionLibraryRuntime* runtime, const std::string& session,
                        const tensorflow::OptimizerOptions& optimizer, std::unique_ptr<tensorflow::Graph> graph,
                        int threads, std::unique_ptr<Partition>* out);

  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;

  // Runs the partition in the step of `context`, which stays valid until `done`.
  void Run(tensorflow::OpKernelContext* context, std::function<void(const Status&)> done) const;

  // The graph as it runs.
  std::shared_ptr<const tensorflow::Graph> graph() const { return graph_; }
  // Why TensorFlow's executor runs it; empty if the lock-free one does.
  const std::string& unsupported() const { return unsupported_; }

 private:
  Partition() = default;

  std::shared_ptr<const tensorflow::Graph> graph_;
  // Exactly one of the two is set.
  std::unique_ptr<Subgraph> subgraph_;
  std::unique_ptr<tensorflow::Executor> stock_;
  std::string unsupported_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_PARTITION_H_
