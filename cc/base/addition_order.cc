#include "cc/base/addition_order.h"

#include <algorithm>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/device_name_utils.h"

namespace starwire {
namespace {

using tensorflow::Edge;
using tensorflow::Node;

// Read by TensorFlow's executor: pairs of an input, and the output that takes its buffer.
constexpr char kForwardAttr[] = "_forward_input";
constexpr int kNever = tensorflow::OpKernelContext::Params::kNeverForward;

bool Crosses(const Edge* edge) {
  return !edge->IsControlEdge() && edge->dst()->IsOp() &&
         !tensorflow::DeviceNameUtils::IsSameAddressSpace(edge->src()->assigned_device_name(),
                                                          edge->dst()->assigned_device_name());
}

}  // namespace

bool HasOrder(const Node& node) { return node.type_string() == "AddN" && node.num_inputs() > 2; }

bool IsSent(const Node& node) { return std::any_of(node.out_edges().begin(), node.out_edges().end(), Crosses); }

std::vector<Node*> SentSums(const tensorflow::Graph& graph) {
  std::vector<Node*> sums;
  for (Node* node : graph.op_nodes()) {
    if (HasOrder(*node) && IsSent(*node)) sums.push_back(node);
  }
  return sums;
}

void PinSum(Node* node) {
  if (HasOrder(*node) && !IsPinned(*node)) node->AddAttr(kForwardAttr, std::vector<int>{kNever, 0});
}

bool IsPinned(const Node& node) {
  std::vector<int> forward;
  return HasOrder(node) && tensorflow::TryGetNodeAttr(node.attrs(), kForwardAttr, &forward) &&
         forward == std::vector<int>{kNever, 0};
}

}  // namespace starwire
