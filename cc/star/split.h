// Carries out the plan of star_server's planner: takes the parameter servers' part out of a graph and puts calls in its
// place.
#ifndef STARWIRE_CC_STAR_SPLIT_H_
#define STARWIRE_CC_STAR_SPLIT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "cc/graph/description.h"
#include "cc/star/ops.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/graph/graph.h"

namespace starwire {

class StarSplit {
 public:
  struct Options {
    // The device that makes the calls: the worker's first CPU.
    std::string client_device;
    // Looks up a device's incarnation. Fails if there is no such device.
    std::function<Status(const std::string& device, uint64_t* incarnation)> incarnation_of;
    // For the graph of a function: a name of its own in this process.
    std::string function;
  };

  // `plan` was made from `description`, which describes `graph`. All are borrowed.
  StarSplit(tensorflow::Graph* graph, const GraphDescription& description, const sw_star_plan* plan, Options options);

  // Creates the plans. Does not change the graph.
  Status Prepare();
  size_t num_calls() const { return calls_.size(); }
  const StarCallSpec& call(size_t number) const { return calls_[number].spec; }
  // Rewrites the graph. After a failure it must not be used.
  Status Apply();

 private:
  using Output = std::pair<uint32_t, int>;  // of a node
  struct Call {
    const sw_star_call* it = nullptr;
    std::string device;
    std::set<uint32_t> nodes;
    std::set<std::string> names;  // of everything in its plan but feeds and fetches
    std::vector<Output> feeds;
    std::vector<Output> fetches;
    std::map<Output, size_t> feed_numbers;
    std::map<Output, size_t> fetch_numbers;
    std::set<Output> returned;  // fetches that return to the worker
    StarCallSpec spec;
    tensorflow::Node* op = nullptr;
  };
  struct Pivot {
    tensorflow::Node* branch = nullptr;        // Switch(predicate, predicate), or an Enter
    std::map<int, tensorflow::Node*> outputs;  // the nodes that run in this branch
  };
  // One end of an edge in the new graph.
  struct End {
    tensorflow::Node* node = nullptr;
    int output = -1;
  };
  struct NewEdge {
    End from;
    tensorflow::Node* to;
    int input;
  };

  uint32_t NumberOf(const tensorflow::Node* node) const { return numbers_.at(node); }
  const std::string& NameOf(uint32_t node) const { return description_.node(node)->name(); }
  bool IsPivot(uint32_t node) const { return plan_.places[node] == SW_PLACE_PIVOT; }
  bool IsKept(uint32_t node) const { return kept_.count(node) != 0; }
  Call* CallOf(uint32_t node);
  void Number(std::vector<Output>* outputs, std::map<Output, size_t>* numbers) const;
  void CollectFeeds();
  void CollectFetches();
  Status MakePlan(Call* call);
  // What a copied handle becomes in a plan: an argument behind the feeds.
  void AddHandle(uint32_t node, Call* call, tensorflow::NodeDef* def) const;
  int32_t ArgumentNumber(uint32_t node) const;
  Status AddToPlan(const Call& call, uint32_t node, tensorflow::GraphDef* plan) const;
  std::string InputOf(const Call& call, uint32_t node, uint32_t edge) const;
  // "`kind`_`number`", or a longer name if a node of the call has this one.
  static std::string NameIn(const Call& call, const std::string& kind, size_t number);

  // The second half.
  Status AddNodes();
  Status AddNode(tensorflow::NodeDef def, tensorflow::Node** out);
  Status AddPivot(uint32_t node);
  Status AddEntry(uint32_t node);
  Status RanIn(uint32_t pivot, int output, tensorflow::Node** out);
  Status ConstantFor(uint32_t constant, const std::string& device, tensorflow::Node** out);
  Status Rewire(uint32_t edge);
  Status RewireCall(Call* call);
  void Connect(End from, uint32_t edge);
  void Remove();
  void MarkLast();

  tensorflow::Graph* const graph_;
  const GraphDescription& description_;
  const Options options_;
  const sw_star_lists plan_;
  std::set<uint32_t> kept_;
  std::unordered_map<const tensorflow::Node*, uint32_t> numbers_;
  std::vector<std::vector<uint32_t>> in_edges_;  // by node
  std::map<Output, int32_t> slots_;
  std::vector<Call> calls_;
  std::map<uint32_t, Pivot> pivots_;
  std::map<std::string, tensorflow::Node*> entries_;  // by loop
  std::map<std::pair<uint32_t, std::string>, tensorflow::Node*> constants_;
  std::vector<NewEdge> new_edges_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_SPLIT_H_
