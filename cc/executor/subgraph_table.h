// TensorFlow's side of a compiled sub-graph: the kernel table. Private to this folder.
#ifndef STARWIRE_CC_EXECUTOR_SUBGRAPH_TABLE_H_
#define STARWIRE_CC_EXECUTOR_SUBGRAPH_TABLE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cc/base/compat_executor.h"
#include "cc/base/handles.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/lib/core/refcount.h"

namespace starwire {

// How a kernel gets an input.
enum class InputKind : uint8_t {
  kValue,       // where the producer leaves it, in every run
  kReference,   // a variable's mutex and tensor, looked up in each run
  kDereferred,  // a variable's value at that moment
};

struct SubgraphNode {
  tensorflow::OpKernel* kernel = nullptr;
  tensorflow::AsyncOpKernel* async = nullptr;
  uint32_t first_input = 0;
  uint32_t num_inputs = 0;
  uint32_t first_slot = 0;
  uint32_t num_outputs = 0;
  uint32_t async_index = 0;
  int32_t fetch = -1;        // of a `_Retval`
  bool inputs_vary = false;  // some input is not kValue
  bool reads_uninitialized = false;
  bool may_be_unavailable = false;
  bool is_pinned = false;            // see PinSum()
  bool* outputs_required = nullptr;  // null: all
};

class SubgraphTable : public tensorflow::core::RefCounted {
 public:
  explicit SubgraphTable(const tensorflow::LocalExecutorParams& params) : params(params) {}
  ~SubgraphTable() override;

  // As Subgraph::Compile.
  Status Compile(const tensorflow::Graph& graph, int threads, std::string* unsupported);
  // Frees kernels and plan; no run may be in progress. Scratches that are still held keep the rest alive.
  void Retire();

  const tensorflow::LocalExecutorParams params;
  std::vector<SubgraphNode> nodes;
  // Per input.
  std::vector<uint32_t> input_slots;
  std::vector<InputKind> input_kinds;
  std::vector<tensorflow::AllocatorAttributes> input_attributes;
  // Per slot.
  std::vector<uint32_t> readers;
  std::vector<tensorflow::AllocatorAttributes> output_attributes;
  std::vector<tensorflow::DataType> output_types;
  // Constants, by slot. This reference keeps kernels from changing the tensor in place.
  std::vector<std::pair<uint32_t, tensorflow::Tensor>> constants;
  std::vector<uint32_t> arg_slots;  // by index; kNoSlot if there is no such `_Arg`
  size_t num_fetches = 0;
  uint32_t num_asyncs = 0;
  uint32_t lanes = 1;
  std::optional<TimelineNodes> timeline_nodes;
  ExecHandle plan;
  const uint32_t* lists = nullptr;

  static constexpr uint32_t kNoSlot = UINT32_MAX;

 private:
  Status AddNode(const tensorflow::Node& node, std::string* unsupported);
  Status Connect(const tensorflow::Graph& graph, std::string* unsupported);

  std::vector<tensorflow::OpKernel*> kernels_;
  std::vector<std::unique_ptr<bool[]>> required_;
  std::vector<uint32_t> index_;  // by node id
  std::vector<sw_exec_node> plan_nodes_;
  std::vector<sw_exec_edge> plan_edges_;
};

// The callbacks of the plan (scratch.cc).
sw_kernels SubgraphKernels();

}  // namespace starwire

#endif  // STARWIRE_CC_EXECUTOR_SUBGRAPH_TABLE_H_
