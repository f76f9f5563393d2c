// Makes a RegisterGraph request available to the pass and the operation that TensorFlow calls on its behalf: TensorFlow
// passes them neither the session nor anything else.
#ifndef STARWIRE_CC_PARTITION_REGISTRATION_H_
#define STARWIRE_CC_PARTITION_REGISTRATION_H_

#include <cstdint>
#include <map>
#include <memory>

#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

// Lives on the stack of the thread that registers the graph: TensorFlow registers it in one call.
class Registration {
 public:
  // `threads`: how many may work on one run of a partition.
  Registration(const tensorflow::RegisterGraphRequest& request, int threads);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // The current one of this thread; null outside a registration.
  static Registration* Current();

  const tensorflow::RegisterGraphRequest& request() const { return request_; }
  int threads() const { return threads_; }

  // Keeps a partition for the kernel that will run it. The number is unique in the process.
  int64_t Leave(std::unique_ptr<tensorflow::Graph> partition);
  // Null if this registration has nothing with that number.
  std::unique_ptr<tensorflow::Graph> Take(int64_t number);

 private:
  const tensorflow::RegisterGraphRequest& request_;
  const int threads_;
  Registration* const outer_;
  std::map<int64_t, std::unique_ptr<tensorflow::Graph>> left_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_REGISTRATION_H_
