// The resource handles that steps of functions (TensorFlow 2) were given on other tasks.
#ifndef STARWIRE_CC_WORKER_STEP_HANDLES_H_
#define STARWIRE_CC_WORKER_STEP_HANDLES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/cancellation.h"

namespace tensorflow {
namespace eager {
class RunComponentFunctionRequest;  // 1.15 does not have it
}
}  // namespace tensorflow

namespace starwire {

// The handle of the worker sessions that belong to an eager context.
std::string EagerSessionOf(uint64_t context_id);

// An attribute of the arguments of component functions whose handles are to be noted: a string that tells the function
// from all others of this process. Nested functions share a step with their caller.
extern const char kHandlesOfAttr[];

// The arguments of a component function in one step.
struct StepHandles {
  // What the eager context of the function's task calls the handle; no output: it has no name there.
  struct Name {
    int64_t op_id = -1;
    int32_t output = -1;
  };
  uint64_t context_id = 0;
  std::vector<Name> names;  // by argument
};

// TensorFlow says which handles a step has on another task when it asks that task to run its part of the function. The
// star calls of the step need them as well, and may be there earlier. Shared by the eager clients and the rendezvous of
// a server.
class HandleBoard {
 public:
  using Found = std::shared_ptr<const StepHandles>;
  using Callback = std::function<void(const Status& status, Found found)>;

  HandleBoard() = default;
  HandleBoard(const HandleBoard&) = delete;
  HandleBoard& operator=(const HandleBoard&) = delete;

  // `request` runs a component function whose arguments have kHandlesOfAttr = `function`. Defined beside the only
  // callers, the eager clients, which builds for TensorFlow 1 lack.
  void Put(const std::string& function, const tensorflow::eager::RunComponentFunctionRequest& request);
  // Calls `callback` exactly once: now, when the handles are put, when the step is cleaned up, or when `cancellation`
  // (may be null) is cancelled. `session`: EagerSessionOf() the context. `device`: of the component function.
  void Get(const std::string& session, int64_t step_id, const std::string& device, const std::string& function,
           tensorflow::CancellationManager* cancellation, Callback callback);
  // The step is over on that device, or on all devices of that task.
  void Drop(uint64_t context_id, int64_t step_id, const std::string& target);

  // The number of steps and devices with handles or a waiting call, for tests.
  size_t size() const;

 private:
  // Session, step, device, function.
  using Key = std::tuple<std::string, int64_t, std::string, std::string>;
  struct Waiting {
    tensorflow::CancellationManager* cancellation;
    tensorflow::CancellationToken token;
    Callback callback;
  };
  struct Entry {
    Found found;
    std::map<uint64_t, Waiting> waiting;
  };

  static void Answer(Waiting waiting, const Status& status, const Found& found);
  void Cancel(const Key& key, uint64_t number);

  mutable std::mutex mu_;
  std::map<Key, Entry> entries_;  // guarded by mu_
  uint64_t next_ = 0;             // guarded by mu_
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_STEP_HANDLES_H_
