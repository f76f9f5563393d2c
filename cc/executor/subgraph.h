// A TensorFlow graph of one CPU device, compiled for the lock-free executor (docs/executor.md), and its runs.
//
//   std::unique_ptr<Subgraph> subgraph;
//   std::string unsupported;
//   RETURN_IF_ERROR(Subgraph::Compile(params, graph, threads, &subgraph, &unsupported));
//   if (!unsupported.empty()) ...                   // TensorFlow's executor can run it; this one cannot
//   step->args... ; step->feeds[i].value = ... ;    // `_Arg` i; `_Retval` i ends up in step->fetches[i]
//   subgraph->Run(step);                            // step->OnDone(status) follows, here or elsewhere
#ifndef STARWIRE_CC_EXECUTOR_SUBGRAPH_H_
#define STARWIRE_CC_EXECUTOR_SUBGRAPH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/compat_executor.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

class SubgraphTable;

// One run: its arguments and results. Belongs to the caller, must not move until OnDone, and can be reused then.
class Step {
 public:
  struct Value {
    tensorflow::Tensor tensor;
    bool dead = true;
  };

  virtual ~Step() = default;

  // Called exactly once per run, on the thread that ran the last kernel.
  virtual void OnDone(const Status& status) = 0;

  // As for TensorFlow's executors. `runner` must be set: it runs expensive kernels on other threads, unless
  // `run_all_kernels_inline` is set. What only functions, collectives and devices other than CPUs need is not used.
  RunArgs args;
  // At least as many as the graph has `_Arg`s. The tensors are moved from, so that a kernel that is the only reader can
  // change them in place.
  std::vector<tensorflow::Tensor> feeds;
  // At least as many as the graph has `_Retval`s.
  std::vector<Value> fetches;
};

class Subgraph {
 public:
  // Kernels come from params.create_kernel; `_Arg` and `_Retval` need none. `threads`: how many may work on one run. If
  // this executor does not support the graph, the result is OK, *unsupported says why and *out stays empty.
  static Status Compile(const tensorflow::LocalExecutorParams& params, const tensorflow::Graph& graph, int threads,
                        std::unique_ptr<Subgraph>* out, std::string* unsupported);

  // No run may be in progress.
  ~Subgraph();
  Subgraph(const Subgraph&) = delete;
  Subgraph& operator=(const Subgraph&) = delete;

  // Runs as far as possible on this thread. Any number of runs may be in progress.
  void Run(Step* step) const;

  size_t num_feeds() const;
  size_t num_fetches() const;
  // Whether a kernel may still run elsewhere when Run() returns.
  bool is_async() const;
  // The total time of all kernels when last measured; 0: not known yet.
  uint64_t CostNanos() const;

 private:
  explicit Subgraph(SubgraphTable* table) : table_(table) {}
  SubgraphTable* const table_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_SUBGRAPH_H_
