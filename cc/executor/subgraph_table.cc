#include "cc/executor/subgraph_table.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "cc/base/addition_order.h"
#include "cc/base/status_codec.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/algorithm.h"

namespace starwire {

using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

SubgraphTable::~SubgraphTable() { Retire(); }

void SubgraphTable::Retire() {
  plan.reset();
  for (tensorflow::OpKernel* kernel : kernels_) params.delete_kernel(kernel);
  kernels_.clear();
}

Status SubgraphTable::Compile(const Graph& graph, int threads, std::string* unsupported) {
  if (params.device->device_type() != tensorflow::DEVICE_CPU) {
    *unsupported = "device " + params.device->name() + " is not a CPU";
    return OkStatus();
  }
  timeline_nodes.emplace(graph);
  index_.assign(graph.num_node_ids(), 0);
  for (const Node* node : graph.op_nodes()) {
    index_[node->id()] = static_cast<uint32_t>(nodes.size());
    Status status = AddNode(*node, unsupported);
    if (!status.ok() || !unsupported->empty()) return status;
  }
  Status status = Connect(graph, unsupported);
  if (!status.ok() || !unsupported->empty()) return status;

  lanes = static_cast<uint32_t>(std::clamp(threads, 1, 64));
  const sw_exec_spec spec = {sizeof(sw_exec_spec), plan_nodes_.data(), plan_nodes_.size(),
                             plan_edges_.data(),   plan_edges_.size(), lanes};
  const sw_kernels kernels = SubgraphKernels();
  ErrorHandle error;
  if (sw_exec_new(&spec, &kernels, this, Into(&plan), Into(&error)) != 0) {
    *unsupported = AsString(sw_error_message(error.get()));
    return OkStatus();
  }
  lists = sw_exec_lists(plan.get());
  return OkStatus();
}

Status SubgraphTable::AddNode(const Node& node, std::string* unsupported) {
  if (node.IsControlFlow()) {
    *unsupported = "node " + node.name() + " belongs to a branch or a loop";
    return OkStatus();
  }
  if (tensorflow::IsTransferNode(&node)) {
    *unsupported = "node " + node.name() + " sends or receives";
    return OkStatus();
  }
  if (node.attrs().Find("_scoped_allocator") != nullptr) {
    *unsupported = "node " + node.name() + " shares its buffer with others";
    return OkStatus();
  }
  SubgraphNode item;
  item.first_input = static_cast<uint32_t>(input_slots.size());
  item.num_inputs = static_cast<uint32_t>(node.num_inputs());
  item.first_slot = static_cast<uint32_t>(readers.size());
  item.num_outputs = static_cast<uint32_t>(node.num_outputs());
  item.reads_uninitialized = node.op_def().allows_uninitialized_input();
  item.may_be_unavailable = MayBeUnavailable(node.op_def());
  item.is_pinned = IsPinned(node);
  input_slots.resize(input_slots.size() + item.num_inputs, kNoSlot);
  input_kinds.resize(input_slots.size(), InputKind::kValue);
  input_attributes.resize(input_slots.size());
  readers.resize(readers.size() + item.num_outputs, 0);
  output_attributes.resize(readers.size());
  for (uint32_t i = 0; i < item.num_outputs; ++i) output_types.push_back(node.output_type(static_cast<int>(i)));

  sw_exec_node plan_node = {0, item.num_inputs, item.num_outputs, 0};
  int32_t index = 0;
  if (node.IsArg() || node.IsRetval()) {
    Status status = tensorflow::GetNodeAttr(node.attrs(), "index", &index);
    if (!status.ok()) return status;
  }
  if (node.IsArg()) {
    plan_node.kind = SW_EXEC_NOTHING;
    if (arg_slots.size() <= static_cast<size_t>(index)) arg_slots.resize(index + 1, kNoSlot);
    arg_slots[index] = item.first_slot;
  } else if (node.IsRetval()) {
    plan_node.kind = SW_EXEC_CHEAP;
    item.fetch = index;
    num_fetches = std::max(num_fetches, static_cast<size_t>(index) + 1);
  } else if (node.type_string() == "NoOp") {
    plan_node.kind = SW_EXEC_NOTHING;
  } else {
    Status status = params.create_kernel(SourceOf(node), &item.kernel);
    if (!status.ok()) return tensorflow::AttachDef(status, node.def());
    kernels_.push_back(item.kernel);
    if (IsDeferred(*item.kernel)) {
      *unsupported = "node " + node.name() + " continues after its kernel returns";
      return OkStatus();
    }
    item.async = item.kernel->AsAsync();
    const tensorflow::Tensor* constant = item.num_outputs == 1 ? ConstTensor(*item.kernel) : nullptr;
    if (constant != nullptr && item.num_inputs == 0) {
      constants.emplace_back(item.first_slot, *constant);
      plan_node.kind = SW_EXEC_NOTHING | SW_EXEC_STATIC;
    } else {
      if (!item.kernel->IsExpensive()) plan_node.kind |= SW_EXEC_CHEAP;
      if (item.async != nullptr) plan_node.kind |= SW_EXEC_ASYNC;
    }
    for (uint32_t i = 0; i < item.num_outputs; ++i) {
      output_attributes[item.first_slot + i].set_on_host(item.kernel->output_memory_types()[i] ==
                                                         tensorflow::HOST_MEMORY);
    }
    item.async_index = num_asyncs;
    num_asyncs += item.async != nullptr ? 1 : 0;
  }
  nodes.push_back(item);
  plan_nodes_.push_back(plan_node);
  return OkStatus();
}

Status SubgraphTable::Connect(const Graph& graph, std::string* unsupported) {
  for (const Edge* edge : graph.edges()) {
    if (!edge->src()->IsOp() || !edge->dst()->IsOp()) continue;
    const uint32_t src = index_[edge->src()->id()];
    const uint32_t dst = index_[edge->dst()->id()];
    if (edge->IsControlEdge()) {
      plan_edges_.push_back({src, SW_EXEC_CONTROL, dst, SW_EXEC_CONTROL});
      continue;
    }
    const uint32_t slot = nodes[src].first_slot + static_cast<uint32_t>(edge->src_output());
    const uint32_t input = nodes[dst].first_input + static_cast<uint32_t>(edge->dst_input());
    plan_edges_.push_back(
        {src, static_cast<uint32_t>(edge->src_output()), dst, static_cast<uint32_t>(edge->dst_input())});
    input_slots[input] = slot;
    input_attributes[input] = output_attributes[slot];
    ++readers[slot];
    const bool is_reference = tensorflow::IsRefType(edge->src()->output_type(edge->src_output()));
    const bool wants_reference = tensorflow::IsRefType(edge->dst()->input_type(edge->dst_input()));
    if (wants_reference && !is_reference) {
      *unsupported = "node " + edge->dst()->name() + " modifies an input that is not a variable";
      return OkStatus();
    }
    if (is_reference) {
      input_kinds[input] = wants_reference ? InputKind::kReference : InputKind::kDereferred;
      nodes[dst].inputs_vary = true;
    }
  }
  for (SubgraphNode& item : nodes) {
    const auto first = readers.begin() + item.first_slot;
    if (std::all_of(first, first + item.num_outputs, [](uint32_t n) { return n > 0; })) continue;
    auto required = std::make_unique<bool[]>(item.num_outputs);
    std::transform(first, first + item.num_outputs, required.get(), [](uint32_t n) { return n > 0; });
    item.outputs_required = required.get();
    required_.push_back(std::move(required));
  }
  return OkStatus();
}

}  // namespace starwire
