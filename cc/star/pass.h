// star_server: rewrites a session's graphs so that each parameter server's part takes a few calls.
#ifndef STARWIRE_CC_STAR_PASS_H_
#define STARWIRE_CC_STAR_PASS_H_

#include <string>

#include "cc/base/compat.h"
#include "cc/graph/wire_dtype.h"
#include "cc/star/rows.h"
#include "cc/star/switch.h"
#include "tensorflow/core/common_runtime/device_set.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// The result for one graph.
struct StarResult {
  size_t calls = 0;
  // For the log; empty if no edge crosses tasks.
  std::string summary;
  RowsResult rows;
  // That wait for no other server (cc/star/counters.h).
  size_t counters = 0;
  WireDtypeResult narrow;
  // How its calls were split; empty: as within one host.
  std::string path;
};

// The task that makes the calls.
struct StarCaller {
  // "/job:worker/replica:0/task:0"
  std::string task;
  StarStyle style = StarStyle::kNone;
  // The graph is that of a function, which an eager context runs on this task.
  bool is_function = false;
};

// Splits a graph that is placed and not yet partitioned; `library` may be null. `wire_dtype`: as cc/graph/wire_dtype.h.
// If it fails with *touched false, the graph is unchanged and can be run.
Status StarGraph(tensorflow::Graph* graph, const tensorflow::DeviceSet& devices,
                 const tensorflow::FunctionLibraryDefinition* library, const StarCaller& caller,
                 tensorflow::DataType wire_dtype, StarResult* result, bool* touched);

// Registers the pass, for the graphs of marked sessions and functions (cc/star/switch.h), and of sessions with a type
// for the wire. It runs before tensor_fuse's.
void RegisterStarPass();

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_PASS_H_
