// One run of a plan on a parameter server, from the call's arrival to its result.
#ifndef STARWIRE_CC_STAR_RUN_H_
#define STARWIRE_CC_STAR_RUN_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/handles.h"
#include "cc/executor/subgraph.h"
#include "cc/star/call_codec.h"
#include "cc/star/feed_sizes.h"
#include "cc/star/object.h"
#include "cc/star/plan.h"
#include "cc/star/value_codec.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/step_stats_collector.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/step_stats.pb.h"

namespace starwire {

class StarService;

// Has one reference to itself until it is over; the transport has another if it can be cancelled.
class StarRun : public Step, public StarObject {
 public:
  StarRun(std::shared_ptr<StarService> service, const sw_star_request& request);

  // Runs the plan, on this thread if the request wants it and the feeds are quickly made, else on TensorFlow's pool.
  // Returns a reference to this run if it can be cancelled.
  StarRun* Begin(const sw_star_request& request, BodyHandle body);
  void Cancel();
  void OnDone(const Status& status) override;

 private:
  using Clock = std::chrono::steady_clock;

  ~StarRun() override;

  // Finds the feeds in the body and in slots.
  Status Read(const sw_star_request& request, BodyHandle body);
  // Makes the feeds and starts the kernels. False if that has to wait or may take long, which a reactor cannot.
  bool Launch();
  // *late: a handle is not there yet. Call it again where it may wait.
  Status MakeFeeds(bool* names_peer, bool* late);
  // Replaces the value that names handles by the handles.
  Status FindHandles(bool* late);
  // The feeds are larger than those of short runs, and this is a reactor.
  bool IsTooLarge();
  void Go();
  Status Answer();
  void Fail(const Status& status, bool names_peer);
  // Before and after the result: whoever has it may rely on everything being over.
  void Leave();
  void End();

  const std::shared_ptr<StarService> service_;
  const sw_ticket ticket_;
  StarObjectPtr<StarPlan> plan_;  // until End()
  const std::string session_;
  const bool wants_trace_;
  const uint64_t short_ns_;
  const std::vector<StarKeep> keeps_;
  bool alone_ = false;  // on a reactor
  ValueDecoder cargo_;
  bool has_values_ = false;
  bool has_feeds_ = false;
  FeedSize size_;
  std::vector<StarValue> values_;                // of the cargo
  std::vector<tensorflow::Tensor> changed_ids_;  // of the plan's updates
  // What the slots hold, in their order; null: the slot is empty.
  std::vector<uint32_t> slots_;
  std::vector<StarObjectPtr<KeptValue>> kept_;
  Clock::time_point started_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> over_{false};
  std::optional<tensorflow::CancellationManager> cancellation_;
  std::optional<tensorflow::ScopedStepContainer> container_;
  tensorflow::Rendezvous* rendezvous_ = nullptr;
  tensorflow::StepStats stats_;
  std::optional<tensorflow::StepStatsCollector> collector_;
  int64_t begun_ = 0;  // for the profiler
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_RUN_H_
