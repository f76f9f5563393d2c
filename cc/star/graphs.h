// Shows the users of a session's graphs the nodes that run in calls.
#ifndef STARWIRE_CC_STAR_GRAPHS_H_
#define STARWIRE_CC_STAR_GRAPHS_H_

#include "cc/base/compat.h"
#include "cc/worker/hooks.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

class StarGraphs : public GraphFeature {
 public:
  // A debugger watches nodes of partitions. A node that runs in a call is in no partition, so a watch on it would wait
  // for a tensor that never arrives.
  Status Check(const tensorflow::RegisterGraphRequest& request) const override;

  // RunOptions.output_partition_graphs: adds the graphs that the calls of a worker's partitions run on their servers.
  void ShowGraphs(tensorflow::MutableRunGraphResponseWrapper* response) const override;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_GRAPHS_H_
