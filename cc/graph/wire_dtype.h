// Values that cross between a worker and its parameter servers with fewer bits, where the session asks for it:
// parameters as they are read, and gradients as they are applied. Everything else crosses as it is, and so does every
// value of a graph that applies no gradient: checkpoints, initial values, evaluations.
#ifndef STARWIRE_CC_GRAPH_WIRE_DTYPE_H_
#define STARWIRE_CC_GRAPH_WIRE_DTYPE_H_

#include <cstddef>
#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

// As starwire.config(wire_dtype=…) says; DT_INVALID: as they are.
tensorflow::DataType WireDtypeOf(const tensorflow::ConfigProto& config);

struct WireDtypeResult {
  size_t pulled = 0;
  size_t pushed = 0;
};

// Rewrites a placed graph; `worker`: the CPU of the session's task. If this fails, the graph must not be used.
Status ApplyWireDtype(tensorflow::Graph* graph, const std::string& worker, tensorflow::DataType dtype,
                      WireDtypeResult* result);

// For the log: ", 3 pulled and 2 pushed values cross as bfloat16", or nothing.
std::string TextOf(const WireDtypeResult& result, tensorflow::DataType dtype);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_WIRE_DTYPE_H_
