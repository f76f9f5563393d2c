// star_server: rewrites a session's graphs so that a parameter server's part of them takes a few calls.
#ifndef STARWIRE_CC_STAR_PASS_H_
#define STARWIRE_CC_STAR_PASS_H_

#include <string>

#include "cc/base/compat.h"
#include "cc/star/switch.h"
#include "tensorflow/core/common_runtime/device_set.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// What became of one graph.
struct StarResult {
  size_t calls = 0;
  // For the log; empty if nothing crosses between tasks.
  std::string summary;
};

// Splits a graph that is placed and not yet partitioned; `library` may be null. Fails without having touched the graph
// if it cannot be planned: then *touched is false, and the graph can be run as it is.
Status StarGraph(tensorflow::Graph* graph, const tensorflow::DeviceSet& devices,
                 const tensorflow::FunctionLibraryDefinition* library, StarStyle style, StarResult* result,
                 bool* touched);

// Makes TensorFlow apply it to the graphs of marked sessions (cc/star/switch.h), before tensors are fused.
void RegisterStarPass();

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_PASS_H_
