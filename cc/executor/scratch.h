// What one run of a sub-graph writes to: values, kernel parameters, the step's outcome. Made once, used by one run
// after the other. Only for the files of this folder.
#ifndef STARWIRE_CC_EXECUTOR_SCRATCH_H_
#define STARWIRE_CC_EXECUTOR_SCRATCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
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

  // Takes the step's feeds in.
  Status Begin(Step* step);

  // The callbacks of sw_kernels.
  uint32_t Run(sw_run* run, const sw_task& task, uint32_t lane, uint32_t detail);
  void Release(uint32_t slot);
  void Unshare(uint32_t slot);
  void Finish(bool failed);
  void Invite(sw_run* helper);
  // Instead of the end of Run(), which threw: the node has failed.
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

    // There while `full`, and not of a reference. Inputs point here whether it is or not.
    union {
      tensorflow::Tensor value;
    };
    // While several kernels are still to read the value: keeps them from changing it in place.
    std::optional<tensorflow::Tensor> shared;
    // Of a reference instead.
    tensorflow::Tensor* variable = nullptr;
    decltype(tensorflow::TensorValue::mutex_if_ref) mutex = nullptr;
    // Of a constant, which its readers find instead.
    const tensorflow::Tensor* constant = nullptr;
    bool full = false;
  };
  // What a kernel is told. The parts that stay the same in a run are filled in once per run.
  struct Parameters {
    tensorflow::OpKernelContext::Params params;
    std::optional<tensorflow::OpKernelContext> context;
    uint64_t run = 0;
  };
  struct Async {
    Parameters parameters;
    tensorflow::NodeExecStatsInterface* stats = nullptr;
    Scratch* scratch = nullptr;
    sw_run* run = nullptr;
    const sw_task* task = nullptr;
    bool kept = false;
    Async* next = nullptr;
  };

  tensorflow::OpKernelContext::Params* Prepare(Parameters* parameters, const SubgraphNode& node);
  // Finds out the inputs that vary. `detail`: of a merge, the only input that is there; else 1 if some input is dead.
  Status PrepareInputs(const SubgraphNode& node, uint32_t detail, bool* is_input_dead);
  tensorflow::TensorValue ValueOf(Slot* slot);
  Status PrepareReference(const SubgraphNode& node, uint32_t input);
  uint32_t Fetch(const SubgraphNode& node, const sw_task& task);
  uint32_t Start(sw_run* run, const SubgraphNode& node, const sw_task& task, bool is_input_dead);
  static void Ended(Async* async);
  // Has all that ended meanwhile reported by another thread.
  void ReportElsewhere(Async* async);
  void ReportAll();
  // Keeps the outputs, or the failure.
  bool Keep(sw_run* run, const SubgraphNode& node, tensorflow::OpKernelContext* context,
            tensorflow::NodeExecStatsInterface* stats);
  Status KeepUnusual(sw_run* run, const SubgraphNode& node, uint32_t output, tensorflow::TensorValue value);
  tensorflow::NodeExecStatsInterface* StartStats(const SubgraphNode& node, tensorflow::OpKernelContext::Params* params);
  void EndStats(tensorflow::NodeExecStatsInterface* stats, tensorflow::OpKernelContext* context);
  // After its kernel: what the task says, and what was made for this kernel alone.
  void Drop(const SubgraphNode& node, const sw_task& task);
  void Fail(Status status, const SubgraphNode& node);

  SubgraphTable* const table_;
  tensorflow::Device* const device_;
  Step* step_ = nullptr;
  uint64_t runs_ = 0;
  std::unique_ptr<Slot[]> slots_;
  std::vector<tensorflow::TensorValue> inputs_;
  std::vector<tensorflow::Tensor> dereferred_;  // by input; empty if no input of the graph is
  std::unique_ptr<Parameters[]> lanes_;
  std::unique_ptr<Async[]> asyncs_;
  std::optional<tensorflow::checkpoint::TensorSliceReaderCacheWrapper> slice_readers_{std::in_place};
  std::atomic<Async*> ended_{nullptr};  // newest first
  std::atomic<bool> failed_{false};
  Status status_;  // written by who set failed_, read when the run is over
};

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_SCRATCH_H_
