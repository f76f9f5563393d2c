// The operation that runs a whole partition of a graph: all that TensorFlow's executor gets to see of it.
#ifndef STARWIRE_CC_PARTITION_OPS_H_
#define STARWIRE_CC_PARTITION_OPS_H_

#include "cc/base/compat.h"
#include "tensorflow/core/framework/graph.pb.h"

namespace starwire {

// Its kernel takes the partition out of the Registration that it is made in.
extern const char kPartitionOp[];
extern const char kPartitionNumberAttr[];
extern const char kPartitionNodePrefix[];

void RegisterPartitionOps();

// For those who ask what a worker runs: the nodes of the partition instead of the operation. Other graphs stay as they
// are.
void ShowPartition(tensorflow::GraphDef* graph);

// Takes out of an error that it went through the operation: it names the node of the partition that it is about.
Status WithoutPartition(const Status& status);

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_OPS_H_
