// The order of reads and updates of one variable that no edge of the graph orders.
#ifndef STARWIRE_CC_GRAPH_ORDERS_H_
#define STARWIRE_CC_GRAPH_ORDERS_H_

#include <cstdint>
#include <vector>

#include "cc/base/compat.h"
#include "cc/graph/description.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Adds control edges to `graph`, of which `description` is no longer one afterwards, so that such reads go before the
// updates, as in TensorFlow where the updates have to wait for a worker. A value that is the memory of a reference
// variable is copied for other tasks first. `servers`: by task of the description, 1 for servers. Harmless if nothing
// else follows.
Status OrderReads(tensorflow::Graph* graph, const GraphDescription& description, const std::vector<uint8_t>& servers);

// The same on all tasks, for a graph whose parts only send and receive. The faster the messages, the more often an
// update that waits for one overtakes a read that waits for a thread of a busy machine.
Status OrderReads(tensorflow::Graph* graph);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_ORDERS_H_
