// The operation that runs a whole partition of a graph. TensorFlow's executor sees nothing else of the partition.
#ifndef STARWIRE_CC_PARTITION_OPS_H_
#define STARWIRE_CC_PARTITION_OPS_H_

#include "cc/base/compat.h"
#include "tensorflow/core/framework/graph.pb.h"

namespace starwire {

// Its kernel takes the partition out of the Registration during which it is created.
extern const char kPartitionOp[];
extern const char kPartitionNumberAttr[];
extern const char kPartitionNodePrefix[];

void RegisterPartitionOps();

// For clients that ask which graphs a worker runs: replaces the operation by the nodes of the partition. Other graphs
// stay unchanged.
void ShowPartition(tensorflow::GraphDef* graph);

// Removes the operation's node from an error message, which already names the node of the partition.
Status WithoutPartition(const Status& status);

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_OPS_H_
