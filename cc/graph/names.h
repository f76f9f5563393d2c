// Names for the nodes that starwire adds to a graph.
#ifndef STARWIRE_CC_GRAPH_NAMES_H_
#define STARWIRE_CC_GRAPH_NAMES_H_

#include <string>
#include <unordered_set>

#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Returns "starwire_WHAT_NUMBER", a name that no other graph has: TensorFlow may share kernels of one name among all
// graphs of a session. The numbers begin with one of the clock's, which no program has.
std::string NumberedName(const std::string& what);

// Makes names that are the same on all workers with the same graph.
class FreeNames {
 public:
  explicit FreeNames(const tensorflow::Graph* graph) : graph_(graph) {}

  // Returns `wanted`, with a number behind it if a node has that name already.
  std::string Take(const std::string& wanted);

 private:
  const tensorflow::Graph* const graph_;
  std::unordered_set<std::string> taken_;  // empty before the first is taken
};

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_NAMES_H_
