#include "cc/executor/exact_updates.h"

#include <string>
#include <utility>

#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"

namespace starwire {

using tensorflow::NodeProperties;

std::shared_ptr<const NodeProperties> WithExactUpdates(const std::shared_ptr<const NodeProperties>& properties) {
  const std::string& op = properties->node_def.op();
  if (op != "AssignAdd" && op != "AssignSub") return properties;
  const auto& attributes = properties->node_def.attr();
  const auto found = attributes.find("use_locking");
  if (found != attributes.end() && found->second.b()) return properties;
  tensorflow::NodeDef locked = properties->node_def;
  (*locked.mutable_attr())["use_locking"].set_b(true);
  return std::make_shared<NodeProperties>(properties->op_def, std::move(locked), properties->input_types,
                                          properties->output_types);
}

}  // namespace starwire
