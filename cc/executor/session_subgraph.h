// A sub-graph of a worker session, or of all sessions with the same devices: what a parameter server keeps for a part
// of its workers' models. A graph that is not for the lock-free executor runs on TensorFlow's.
#ifndef STARWIRE_CC_EXECUTOR_SESSION_SUBGRAPH_H_
#define STARWIRE_CC_EXECUTOR_SESSION_SUBGRAPH_H_

#include <memory>
#include <string>

#include "cc/base/compat.h"
#include "cc/executor/subgraph.h"
#include "tensorflow/core/common_runtime/process_function_library_runtime.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

class SessionSubgraph {
 public:
  // Whose kernels with a state are.
  enum class Kernels {
    kSessions,  // the session's, by name, as for TensorFlow's own graphs
    kOwn,       // the sub-graph's, like all others: their state is found by its name, or there is none
  };

  // All nodes of `graph` are placed on one device of the session. With kSessions, node names of operations with a state
  // are the session's names for it: unique, unless the same thing is meant. `handle` is the session's, as the master
  // knows it. `session` stays alive as long as this does.
  static Status Register(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle,
                         const tensorflow::GraphDef& graph, const tensorflow::ConfigProto& config, int threads,
                         Kernels kernels, std::unique_ptr<SessionSubgraph>* out);

  // No run may be under way.
  ~SessionSubgraph();
  SessionSubgraph(const SessionSubgraph&) = delete;
  SessionSubgraph& operator=(const SessionSubgraph&) = delete;

  // As Subgraph::Run.
  void Run(Step* step) const;

  size_t num_feeds() const { return num_feeds_; }
  size_t num_fetches() const { return num_fetches_; }
  // Why TensorFlow's executor runs it; empty if the lock-free one does.
  const std::string& unsupported() const { return unsupported_; }
  // Whether some kernel may go on elsewhere when Run() returns.
  bool is_async() const { return subgraph_ == nullptr || subgraph_->is_async(); }
  // See Subgraph; 0 if TensorFlow's executor runs it.
  uint64_t CostNanos() const { return subgraph_ == nullptr ? 0 : subgraph_->CostNanos(); }

 private:
  SessionSubgraph(std::shared_ptr<tensorflow::WorkerSession> session, const std::string& handle)
      : session_(std::move(session)), handle_(handle) {}
  Status Build(const tensorflow::GraphDef& graph, const tensorflow::ConfigProto& config, int threads, Kernels kernels);
  Status FindDevice(const tensorflow::GraphDef& graph, tensorflow::Device** device) const;

  const std::shared_ptr<tensorflow::WorkerSession> session_;
  const std::string handle_;
  std::unique_ptr<tensorflow::FunctionLibraryDefinition> library_;
  std::unique_ptr<tensorflow::ProcessFunctionLibraryRuntime> runtime_;
  tensorflow::Device* held_ = nullptr;  // where kernels are held
  // One of the two.
  std::unique_ptr<Subgraph> subgraph_;
  std::unique_ptr<tensorflow::Executor> stock_;
  std::string unsupported_;
  size_t num_feeds_ = 0;
  size_t num_fetches_ = 0;
};

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_SESSION_SUBGRAPH_H_
