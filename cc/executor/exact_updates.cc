#include "cc/executor/exact_updates.h"

#include <string>
#include <utility>

#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"

namespace starwire {

KernelSource WithExactUpdates(const KernelSource& source) {
  const tensorflow::NodeDef& node = DefOf(source);
  const std::string& op = node.op();
  if (op != "AssignAdd" && op != "AssignSub") return source;
  const auto& attributes = node.attr();
  const auto found = attributes.find("use_locking");
  if (found != attributes.end() && found->second.b()) return source;
  tensorflow::NodeDef locked = node;
  (*locked.mutable_attr())["use_locking"].set_b(true);
  return WithDef(source, std::move(locked));
}

}  // namespace starwire
