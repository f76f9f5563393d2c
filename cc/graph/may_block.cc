#include "cc/graph/may_block.h"

#include <string>

#include "absl/strings/match.h"
#include "tensorflow/core/framework/attr_value.pb.h"

namespace starwire {
namespace {

// Parts of names. Too many here only means that some tensors travel alone.
constexpr const char* kWaiting[] = {
    "Dequeue", "Enqueue",    "Barrier",   "TakeGradient", "TakeMany",    "Collective",     "Nccl",          "GetNext",
    "PyFunc",  "RemoteCall", "MutexLock", "ReaderRead",   "Stage",       "MapPeek",        "RecordInput",   "Recv",
    "Unbatch", "Infeed",     "Outfeed",   "WaitFor",      "DataService", "DatasetToGraph", "ReduceDataset",
};

constexpr const char* kWaitingExactly[] = {"Batch", "BatchFunction", "StarwireCall"};

}  // namespace

bool MayBlock(const tensorflow::NodeDef& node) {
  const std::string& op = node.op();
  for (const char* part : kWaiting) {
    if (absl::StrContains(op, part)) return true;
  }
  for (const char* name : kWaitingExactly) {
    if (op == name) return true;
  }
  for (const auto& attribute : node.attr()) {
    if (attribute.second.has_func() || attribute.second.list().func_size() > 0) return true;
  }
  return false;
}

}  // namespace starwire
