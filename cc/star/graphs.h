// What users who look at a session's graphs see of those that run in calls.
#ifndef STARWIRE_CC_STAR_GRAPHS_H_
#define STARWIRE_CC_STAR_GRAPHS_H_

#include "cc/base/compat.h"
#include "cc/worker/hooks.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

class StarGraphs : public GraphFeature {
 public:
  // A debugger's watches are put on the nodes of partitions. Nodes that are run by a call are in none: a watch on one
  // of them would wait for a tensor that never comes.
  Status Check(const tensorflow::RegisterGraphRequest& request) const override;

  // RunOptions.output_partition_graphs: adds what the calls of a worker's partitions run on their servers.
  void ShowGraphs(tensorflow::MutableRunGraphResponseWrapper* response) const override;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_GRAPHS_H_
