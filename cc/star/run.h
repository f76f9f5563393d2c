// One star call on a parameter server, from its arrival to its answer.
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
#include "cc/star/cargo.h"
#include "cc/star/plan.h"
#include "cc/star/wire.h"
#include "include/starwire.h"
#include "tensorflow/core/common_runtime/step_stats_collector.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/step_stats.pb.h"

namespace starwire {

class StarService;

class StarRun : public Step, public std::enable_shared_from_this<StarRun> {
 public:
  StarRun(std::shared_ptr<StarService> service, BodyHandle body, const sw_call_request& request);
  ~StarRun() override;

  // Checks the request, and finds the feeds in its body.
  Status Read(const sw_call_request& request);
  // Whether TakeValues() takes long.
  bool is_laborious() const { return cargo_.is_laborious(); }
  Status TakeValues();
  // Counts the call, and asks whether its peer may have one more.
  Status Begin();
  // Takes the reference to the plan over, and puts the feeds in place.
  Status Prepare(StarPlan* plan);
  // For runs that may take a while: before anybody else knows this one.
  void MakeCancellable() { cancellation_.emplace(); }
  // Runs the plan on this thread, as far as it goes; the answer follows. `alone`: on a reactor.
  void Go(bool alone);

  // Answers; the run is over. One of these, once, unless Go() was called.
  void Fail(const Status& status);
  void AskForPlan();

  void Cancel();
  void OnDone(const Status& status) override;

  const sw_ticket ticket;
  const std::string& session() const { return session_; }
  const PlanHash& plan_hash() const { return call_.plan; }
  uint64_t incarnation() const { return call_.incarnation; }
  bool wants_trace() const { return (call_.flags & StarCall::kTrace) != 0; }
  StarPlan* plan() const { return plan_; }

 private:
  using Clock = std::chrono::steady_clock;

  Status TakeFeeds();
  Status KeepFetches();
  // Not OK: there was no answer.
  Status Answer();
  // Before and after the answer: whoever has it may rely on what the table says.
  void Leave();
  void End();

  const std::shared_ptr<StarService> service_;
  BodyHandle body_;  // until Read()
  StarCall call_;
  std::string session_;
  CargoIn cargo_;
  std::vector<StarValue> values_;  // feeds, then fetches
  StarPlan* plan_ = nullptr;
  bool uses_slots_ = false;
  bool began_ = false;
  bool alone_ = false;
  uint64_t bytes_in_ = 0;
  uint64_t bytes_out_ = 0;
  const Clock::time_point arrived_;
  Clock::time_point started_;
  std::shared_ptr<StarRun> self_;  // while it runs
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> over_{false};
  std::optional<tensorflow::CancellationManager> cancellation_;
  std::optional<tensorflow::ScopedStepContainer> container_;
  tensorflow::Rendezvous* rendezvous_ = nullptr;
  tensorflow::StepStats stats_;
  std::optional<tensorflow::StepStatsCollector> collector_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_RUN_H_
