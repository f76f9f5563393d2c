// The order of reads and updates of one variable that no edge of the graph orders.
#ifndef STARWIRE_CC_GRAPH_ORDERS_H_
#define STARWIRE_CC_GRAPH_ORDERS_H_

#include "cc/base/compat.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Adds control edges so that such reads go before the updates, as in TensorFlow where the updates have to wait for a
// message: the faster messages are, the more often an update that waits for one overtakes a read that waits for a
// thread of a busy machine, and in a star call all of them arrive together. A value that is the memory of a reference
// variable is copied for other tasks first. Harmless if nothing else follows.
Status OrderReads(tensorflow::Graph* graph);

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_ORDERS_H_
