// Sparse rows cross once. A batch looks the same row of an embedding up many times, and its gradient has a row for each
// time. The worker asks for each row once and copies it to where it is needed; and it adds up the gradient's rows of
// equal ids, which TensorFlow leaves to the parameter server. Same operands, same order of additions: same bits.
#ifndef STARWIRE_CC_STAR_ROWS_H_
#define STARWIRE_CC_STAR_ROWS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Of a node: the names of those whose values no longer exist because of it.
inline constexpr char kReplacesAttr[] = "_starwire_replaces";

struct RowsResult {
  size_t lookups = 0;
  size_t sums = 0;
};

// Rewrites a placed graph. `worker`: the CPU that makes the calls; `servers`: the CPUs that they go to. If this fails,
// the graph must not be used.
Status SendRowsOnce(tensorflow::Graph* graph, const std::string& worker, const std::vector<std::string>& servers,
                    RowsResult* result);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_ROWS_H_
