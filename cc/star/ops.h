// The operation that replaces a parameter server's part of a graph: a call to that server.
#ifndef STARWIRE_CC_STAR_OPS_H_
#define STARWIRE_CC_STAR_OPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/types.h"

namespace starwire {

extern const char kStarCallOp[];

// The attributes of one such operation.
struct StarCallSpec {
  // The whole plan, and the task that runs it: "/job:ps/replica:0/task:0".
  std::string plan;
  std::string task;
  // Incarnation of the plan's device as the session knows it.
  uint64_t incarnation = 0;
  tensorflow::DataTypeVector inputs;
  tensorflow::DataTypeVector outputs;
  // By feed: its slot on the server, or -1 for the next input.
  std::vector<int32_t> feeds;
  // By fetch: the slot on the server that keeps it, or -1.
  std::vector<int32_t> keeps;
  // By fetch: its output, or -1.
  std::vector<int32_t> returns;
  // No later call of the step needs a slot on this server.
  bool last = false;
  // Handles that follow the feeds: each is an argument of the device's part of the function.
  std::vector<int32_t> handles;
  // The function whose handles they are: kHandlesOfAttr (cc/worker/step_handles.h).
  std::string function;
};

void SetAttributes(const StarCallSpec& spec, tensorflow::NodeDef* def);

// Registers the operation and its kernel with TensorFlow.
void RegisterStarOps();

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_OPS_H_
