// star_server_lite: a counter, such as the global step, does not wait for the updates on other servers, which would
// take a call of its own and a round trip at the end of each step. It waits for those on its own server, and goes with
// them.
#ifndef STARWIRE_CC_STAR_COUNTERS_H_
#define STARWIRE_CC_STAR_COUNTERS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Rewrites a placed graph, and counts the counters in it that wait for less than before. `worker`: the CPU that makes
// the calls; `servers`: the CPUs that they go to. If this fails, the graph must not be used.
Status UncoupleCounters(tensorflow::Graph* graph, const std::string& worker, const std::vector<std::string>& servers,
                        size_t* counters);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_COUNTERS_H_
