// The mutable state of one run of a sub-graph: values, kernel parameters, outcome. Reused by one run after another.
// Private to this folder.
#ifndef STARWIRE_CC_EXECUTOR_SCRATCH_H_
#define STARWIRE_CC_EXECUTOR_SCRATCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "cc/base/compat_executor.h"
#include "cc/executor/subgraph.h"
#include "cc/executor/subgraph_table.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/step_stats_collector.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/tensor_slice_reader_cache.h"

namespace starwire {

class Scratch {
 public:
  explicit Scratch(SubgraphTable* table);
  ~Scratch() { table_->Unref(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Takes over the step's feeds.
  Status Begin(Step* step);

  // The callbacks of sw_kernels.
  uint32_t Run(sw_run* run, const sw_task& task, uint32_t lane);
  void Release(uint32_t slot);
  void Unshare(uint32_t slot);
  void Finish(bool failed);
  void Invite(sw_run* helper);
  // Fails the node after an exception in Run().
  uint32_t Threw(const Status& thrown, const sw_task& task, uint32_t lane) noexcept;

 private:
  struct Slot {
    Slot() {}
    ~Slot() { Empty(); }
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    void Fill(tensorflow::Tensor&& tensor, bool is_shared) {
      new (&value) tensorflow::Tensor(std::move(tensor));
      full = true;
      if (is_shared) shared.emplace(value);
    }
    void Empty() {
      if (!full) return;
      full = false;
      if (mutex == nullptr) value.~Tensor();
      if (shared.has_value()) shared.reset();
      mutex = nullptr;
    }

    // Constructed while `full`, unless the slot holds a reference. Inputs point here in either case.
    union {
      tensorflow::Tensor value;
    };
    // Set while several kernels have yet to read the value: a second reference keeps them from changing it in place.
    std::optional<tensorflow::Tensor> shared;
    // The slot holds a reference: its variable.
    tensorflow::Tensor* variable = nullptr;
    decltype(tensorflow::TensorValue::mutex_if_ref) mutex = nullptr;
    // The slot holds a constant, which its readers use instead of `value`.
    const tensorflow::Tensor* constant = nullptr;
    bool full = false;
  };
  // A kernel's parameters. Those that are the same throughout a run are filled in once per run.
  struct Parameters {
    tensorflow::OpKernelContext::Params params;
    KernelInputs<tensorflow::OpKernelContext::Params> inputs;
    std::optional<tensorflow::OpKernelContext> context;
    uint64_t run = 0;
  };
  struct Async {
    Parameters parameters;
    tensorflow::NodeExecStatsInterface* stats = nullptr;
    Scratch* scratch = nullptr;
    sw_run* run = nullptr;
    const sw_task* task = nullptr;
  };

  tensorflow::OpKernelContext::Params* Prepare(Parameters* parameters, const SubgraphNode& node);
  // Looks up the inputs that vary.
  Status PrepareInputs(const SubgraphNode& node);
  Status PrepareReference(const SubgraphNode& node, uint32_t input);
  uint32_t Fetch(const SubgraphNode& node, const sw_task& task);
  uint32_t Start(sw_run* run, const SubgraphNode& node, const sw_task& task);
  static void Ended(Async* async);
  // Stores the outputs, or the failure.
  bool Keep(const SubgraphNode& node, tensorflow::OpKernelContext* context, tensorflow::NodeExecStatsInterface* stats);
  Status KeepUnusual(const SubgraphNode& node, uint32_t output, tensorflow::TensorValue value);
  tensorflow::NodeExecStatsInterface* StartStats(const SubgraphNode& node, tensorflow::OpKernelContext::Params* params);
  void EndStats(tensorflow::NodeExecStatsInterface* stats, tensorflow::OpKernelContext* context);
  // After the node's kernel: releases the values that the task lists, and those made for this kernel only.
  void Drop(const SubgraphNode& node, const sw_task& task);
  void Fail(Status status, const SubgraphNode& node);

  SubgraphTable* const table_;
  tensorflow::Device* const device_;
  Step* step_ = nullptr;
  uint64_t runs_ = 0;
  std::unique_ptr<Slot[]> slots_;
  std::vector<tensorflow::TensorValue> inputs_;
  std::vector<tensorflow::Tensor> dereferred_;  // by input; empty if no input of the graph is dereferred
  std::unique_ptr<Parameters[]> lanes_;
  std::unique_ptr<Async[]> asyncs_;
  std::optional<tensorflow::checkpoint::TensorSliceReaderCacheWrapper> slice_readers_{std::in_place};
  std::atomic<bool> failed_{false};
  Status status_;  // written by the thread that set failed_, read when the run is over
};

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_SCRATCH_H_
