// Moves partitions of a worker's graphs to the lock-free executor (docs/executor.md). TensorFlow always uses its own
// executor for them, so each is replaced by a graph with one operation, which runs it.
#ifndef STARWIRE_CC_PARTITION_PASS_H_
#define STARWIRE_CC_PARTITION_PASS_H_

#include <string>

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Runs after all other passes that see partitions. Has no effect outside a Registration.
void RegisterPartitionPass();

// Why TensorFlow's executor has to run the partition of a device; empty if nothing in the graph requires it.
std::string WhyPartitionStays(const tensorflow::Graph& graph, const std::string& device);

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_PASS_H_
