// The operation that stands for a parameter server's part of a graph: a call to it.
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

// What one such operation is told, as its attributes.
struct StarCallSpec {
  // The whole plan, and where it is to run: "/job:ps/replica:0/task:0".
  std::string plan;
  std::string task;
  // Of the plan's device, as the session knows it.
  uint64_t incarnation = 0;
  // Which of the step's calls it is.
  int number = 0;
  tensorflow::DataTypeVector inputs;
  tensorflow::DataTypeVector outputs;
  // By feed: the slot on the server where it is found, or -1: the next input.
  std::vector<int32_t> feeds;
  // By fetch: the slot on the server where it is kept, or -1.
  std::vector<int32_t> keeps;
  // By fetch: the output that it is, or -1.
  std::vector<int32_t> returns;
  // No call of the step that comes later needs a slot on this server.
  bool last = false;
};

void SetAttributes(const StarCallSpec& spec, tensorflow::NodeDef* def);

// Makes TensorFlow know the operation and its kernel.
void RegisterStarOps();

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_OPS_H_
