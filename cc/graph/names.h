// Names for the nodes that starwire adds to a graph.
#ifndef STARWIRE_CC_GRAPH_NAMES_H_
#define STARWIRE_CC_GRAPH_NAMES_H_

#include <string>
#include <unordered_set>

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// For nodes of which no other graph may have one of the same name, as TensorFlow may share kernels of one name among
// all graphs of a session: "starwire_WHAT_NUMBER". The numbers begin with one of the clock's: no program has such
// nodes.
std::string NumberedName(const std::string& what);

// For nodes that have the same name on all workers with the same graph.
class FreeNames {
 public:
  explicit FreeNames(const tensorflow::Graph* graph) : graph_(graph) {}

  // `wanted`, with a number behind it if a node has that name already.
  std::string Take(const std::string& wanted);

 private:
  const tensorflow::Graph* const graph_;
  std::unordered_set<std::string> taken_;  // empty before the first is taken
};

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_NAMES_H_
