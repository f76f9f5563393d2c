// A sub-graph of one worker session, or of all sessions with the same devices: what a parameter server keeps of its
// workers' models. A graph that the lock-free executor does not support runs on TensorFlow's.
#ifndef STARWIRE_CC_EXECUTOR_SESSION_SUBGRAPH_H_
#define STARWIRE_CC_EXECUTOR_SESSION_SUBGRAPH_H_

#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "cc/executor/kernel_params.h"
#include "cc/executor/subgraph.h"
#include "tensorflow/core/common_runtime/process_function_library_runtime.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

class SessionSubgraph {
 public:
  // All nodes of `graph` are placed on one device of the session. With kSession, the node names of stateful operations
  // identify their state in the session: they are equal only for the same state. `handle` is the session's handle, as
  // the master knows it. `session` stays alive as long as this object.
  static Status Register(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                         const tensorflow::GraphDef& graph, const tensorflow::ConfigProto& config, int threads,
                         KernelOwner owner, std::unique_ptr<SessionSubgraph>* out);

  // No run may be in progress.
  ~SessionSubgraph();
  SessionSubgraph(const SessionSubgraph&) = delete;
  SessionSubgraph& operator=(const SessionSubgraph&) = delete;

  // As Subgraph::Run.
  void Run(Step* step) const;

  size_t num_feeds() const { return num_feeds_; }
  size_t num_fetches() const { return num_fetches_; }
  // Why TensorFlow's executor runs it; empty if the lock-free one does.
  const std::string& unsupported() const { return unsupported_; }
  // Whether a kernel may still run elsewhere when Run() returns.
  bool is_async() const { return subgraph_ == nullptr || subgraph_->is_async(); }
  // See Subgraph; 0 if TensorFlow's executor runs it.
  uint64_t CostNanos() const { return subgraph_ == nullptr ? 0 : subgraph_->CostNanos(); }

 private:
  SessionSubgraph(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle)
      : session_(std::move(session)), handle_(handle) {}
  Status Build(const tensorflow::GraphDef& graph, const tensorflow::ConfigProto& config, int threads,
               KernelOwner owner);
  Status CountValues(const tensorflow::Graph& graph);
  Status FindDevice(const tensorflow::GraphDef& graph, tensorflow::Device** device) const;

  const std::shared_ptr<tensorflow::WorkerSession> session_;
  const std::string handle_;
  std::unique_ptr<tensorflow::FunctionLibraryDefinition> library_;
  std::unique_ptr<tensorflow::ProcessFunctionLibraryRuntime> runtime_;
  tensorflow::Device* held_ = nullptr;  // the device that holds the kernels
  // Exactly one of the two is set.
  std::unique_ptr<Subgraph> subgraph_;
  std::unique_ptr<tensorflow::Executor> stock_;
  std::string unsupported_;
  size_t num_feeds_ = 0;
  size_t num_fetches_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_SESSION_SUBGRAPH_H_
