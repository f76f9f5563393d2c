#include "cc/partition/graphs.h"

#include "cc/partition/ops.h"
#include "cc/partition/registration.h"

namespace starwire {

void PartitionGraphs::Register(const tensorflow::RegisterGraphRequest& request, int threads,
                               const std::function<void()>& next) const {
  if (!on_.load()) {
    next();
    return;
  }
  const Registration registration(request, threads);
  next();
}

void PartitionGraphs::ShowGraphs(tensorflow::MutableRunGraphResponseWrapper* response) const {
  if (!on_.load(std::memory_order_relaxed)) return;
  for (size_t i = 0; i < response->num_partition_graphs(); ++i) ShowPartition(response->mutable_partition_graph(i));
}

Status PartitionGraphs::Translate(const Status& status) const {
  return on_.load(std::memory_order_relaxed) ? WithoutPartition(status) : status;
}

}  // namespace starwire
