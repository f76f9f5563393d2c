// A partition of a session's graph as TensorFlow's worker has it: run by the lock-free executor, with the step, the
// rendezvous and the function library that TensorFlow's executor would have. One that turns out not to be for this
// executor runs on TensorFlow's.
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
  // `runtime` is the graph's, of the partition's device, and holds the session's kernels for as long as this lives.
  // `session` is what the device keeps the kernels under that have a state. The graph is optimized as TensorFlow would.
  // `threads`: how many may work on one run.
  static Status Compile(tensorflow::FunctionLibraryRuntime* runtime, const std::string& session,
                        const tensorflow::OptimizerOptions& optimizer, std::unique_ptr<tensorflow::Graph> graph,
                        int threads, std::unique_ptr<Partition>* out);

  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;

  // One run, of the step that `context` belongs to, which stays valid until `done`.
  void Run(tensorflow::OpKernelContext* context, std::function<void(const Status&)> done) const;

  // As it is run.
  std::shared_ptr<const tensorflow::Graph> graph() const { return graph_; }
  // Why TensorFlow's executor runs it; empty if the lock-free one does.
  const std::string& unsupported() const { return unsupported_; }

 private:
  Partition() = default;

  std::shared_ptr<const tensorflow::Graph> graph_;
  // One of the two.
  std::unique_ptr<Subgraph> subgraph_;
  std::unique_ptr<tensorflow::Executor> stock_;
  std::string unsupported_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_PARTITION_H_
