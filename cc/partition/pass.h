// Has partitions of a worker's graphs run by the lock-free executor (docs/executor.md). TensorFlow always uses its own
// executor for them, so a partition is replaced by a graph of one operation, which runs it.
#ifndef STARWIRE_CC_PARTITION_PASS_H_
#define STARWIRE_CC_PARTITION_PASS_H_

#include <string>

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Behind all others that see partitions. Does something only within a Registration.
void RegisterPartitionPass();

// Why TensorFlow's executor has to run the partition of a device; empty if, for all that the graph tells, it need not.
std::string WhyPartitionStays(const tensorflow::Graph& graph, const std::string& device);

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_PASS_H_
