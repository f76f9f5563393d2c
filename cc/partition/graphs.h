// How a worker registers partitions that run on the lock-free executor, and how its clients see them.
#ifndef STARWIRE_CC_PARTITION_GRAPHS_H_
#define STARWIRE_CC_PARTITION_GRAPHS_H_

#include <atomic>
#include <functional>

#include "cc/base/compat.h"
#include "cc/worker/hooks.h"
#include "tensorflow/core/distributed_runtime/message_wrappers.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace starwire {

class PartitionGraphs : public GraphFeature {
 public:
  // Whether partitions of graphs registered from now on run on that executor where it supports them.
  void Use(bool on) { on_.store(on); }

  void Register(const tensorflow::RegisterGraphRequest& request, int threads,
                const std::function<void()>& next) const override;
  void ShowGraphs(tensorflow::MutableRunGraphResponseWrapper* response) const override;
  Status Translate(const Status& status) const override;

 private:
  std::atomic<bool> on_{false};
};

}  // namespace starwire

#endif  // STARWIRE_CC_PARTITION_GRAPHS_H_
