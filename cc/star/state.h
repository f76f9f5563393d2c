// The variables of a parameter server whose state outlives its process (crates/state): which of their rows have
// changed, and how they are made again.
//
// Known are the variables that star calls' plans and registered graphs name. What a plan may change follows from the op
// table: the rows of a sparse update whose ids are a feed, else whole variables. Graphs that TensorFlow runs itself
// change all of them, if they may change any.
#ifndef STARWIRE_CC_STAR_STATE_H_
#define STARWIRE_CC_STAR_STATE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/worker/session_recovery.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace starwire {

class StateVariable;

// A session can go on on a server that came back with graphs that need nothing of it but its state.
Needs NeedsOf(const tensorflow::GraphDef& graph);

// A variable that a plan may change.
struct StateUpdate {
  // Null: all that are known.
  std::shared_ptr<StateVariable> variable;
  // The feed with the rows; negative: all of them.
  int feed = -1;
};

class StarState {
 public:
  explicit StarState(tensorflow::WorkerEnv* env);
  ~StarState();
  StarState(const StarState&) = delete;
  StarState& operator=(const StarState&) = delete;

  // For sw_star_handlers.restore. From here, the state is on.
  Status Restore(const sw_state* state);
  bool is_on() const { return is_on_.load(std::memory_order_acquire); }

  // What a plan or graph for the server's own devices may change. Its variables are known from here.
  std::vector<StateUpdate> UpdatesOf(const tensorflow::GraphDef& plan);
  // A run of the plan is over. `ids`: the feeds of UpdatesOf(), in its order.
  void Changed(const std::vector<StateUpdate>& updates, const std::vector<tensorflow::Tensor>& ids);
  void AllChanged();
  // These containers are about to be cleared; none: the default ones.
  void CleanedUp(const std::vector<std::string>& containers);

  // For sw_star_handlers.changes.
  void Write(sw_changes* changes, bool early);

 private:
  std::shared_ptr<StateVariable> Know(const tensorflow::NodeDef& node);
  std::vector<StateUpdate> KnownUpdatesOf(const tensorflow::GraphDef& plan);
  void FindOwnDevice(tensorflow::NodeDef* definition) const;
  Status RestoreOne(const sw_state* state, const sw_state_variable& stored);
  std::vector<std::shared_ptr<StateVariable>> All();

  tensorflow::WorkerEnv* const env_;
  std::atomic<bool> is_on_{false};
  std::mutex mu_;
  // By device, container, kind and name, one for each type that a graph expects. At most one of them exists. Guarded by
  // mu_.
  std::map<std::string, std::vector<std::shared_ptr<StateVariable>>> variables_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_STATE_H_
