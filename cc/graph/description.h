// A TensorFlow graph in the form that the planners of include/starwire.h take.
#ifndef STARWIRE_CC_GRAPH_DESCRIPTION_H_
#define STARWIRE_CC_GRAPH_DESCRIPTION_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

// Borrows the graph, which must be placed and must not change in the meantime.
class GraphDescription {
 public:
  explicit GraphDescription(const tensorflow::Graph& graph);
  GraphDescription(const GraphDescription&) = delete;
  GraphDescription& operator=(const GraphDescription&) = delete;

  // Whether anything crosses between tasks. If not, the rest is not needed.
  bool crosses() const { return crosses_; }
  // Finds out how much crossing edges carry. This takes longer. `guess`: also within tasks, and where a batch or a
  // string decides it, by what is usual.
  void FindSizes(bool guess);
  // All that is known to cross.
  uint64_t CrossingBytes() const;
  // Finds out which feeds a client may hold back. This takes longer, too.
  void FindFeeds();
  // Forbids inserting anything between the node and its neighbours.
  // Returns whether it was allowed before.
  bool LeaveAlone(uint32_t number);

  sw_plan_graph ForPlanner() const;
  size_t num_nodes() const { return nodes_.size(); }
  size_t num_edges() const { return edges_.size(); }
  tensorflow::Node* node(uint32_t number) const { return nodes_[number]; }
  const tensorflow::Edge* edge(uint32_t number) const { return edges_[number]; }
  // "/job:ps/replica:0/task:1"
  const std::vector<std::string>& tasks() const { return tasks_; }
  const std::string& task(uint32_t number) const { return tasks_[number]; }
  uint32_t task_of(uint32_t node) const { return plan_nodes_[node].task; }

 private:
  struct Place {
    uint32_t task;
    uint32_t device;
    std::string type;  // of the device
  };

  const Place& PlaceOf(const tensorflow::Node& node);
  void AddNode(tensorflow::Node* node);
  void AddEdge(const tensorflow::Edge* edge);
  void AddBlocker(uint32_t task, const std::vector<uint32_t>& feeds);
  static sw_bytes Name(void* self, uint32_t node);

  const tensorflow::Graph& graph_;
  std::vector<tensorflow::Node*> nodes_;
  std::vector<const tensorflow::Edge*> edges_;
  std::vector<uint32_t> numbers_;  // of nodes, by id
  std::vector<std::string> tasks_;
  std::unordered_map<std::string, uint32_t> task_numbers_;
  std::unordered_map<std::string, Place> places_;  // by device name
  std::unordered_map<std::string, uint32_t> frames_;
  std::unordered_map<std::string, uint32_t> variables_;
  std::vector<sw_plan_node> plan_nodes_;  // may extend beyond nodes_, as plan_edges_ beyond edges_: see AddBlocker
  std::vector<sw_plan_edge> plan_edges_;
  bool crosses_ = false;
  bool has_captures_ = false;
};

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_DESCRIPTION_H_
