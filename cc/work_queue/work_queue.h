// A queue of work items (names of files, say) that a task hands out to workers: in epochs, shuffled, and again when a
// worker has gone before it was done with one (docs/elastic.md).
#ifndef STARWIRE_CC_WORK_QUEUE_WORK_QUEUE_H_
#define STARWIRE_CC_WORK_QUEUE_WORK_QUEUE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/compat.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace starwire {

class WorkQueue : public tensorflow::ResourceBase {
 public:
  struct Options {
    int64_t epochs = 1;
    bool shuffle = false;
    // Of the shuffles: the order of an epoch follows from it.
    uint64_t seed = 0;
  };

  // Who asks for an item.
  struct Worker {
    std::string name;
    // Of its process: another one means that the old process has gone.
    int64_t incarnation = 0;
    // It works on so many items at a time: it is done with the earlier ones. At least 1.
    int64_t in_progress = 1;
    // It has gone if it asks for nothing for so long.
    std::chrono::milliseconds lease{0};
    // If other tasks have the last items, it waits until these are done, or come back.
    bool waits = false;
    // Whose part it is, with others that have names of their own; empty: it is alone.
    std::string task;
  };

  using Clock = std::chrono::steady_clock;
  using Taken = std::function<void(const Status& status, const std::string& item)>;

  std::string DebugString() const override;

  // Has no effect on a queue that has items.
  Status Create(std::vector<std::string> items, const Options& options);
  // As Create, but what `state` says is done stays done; items in progress are handed out again. If `state` is of other
  // items, *is_other is true, and all are handed out.
  Status Restore(std::vector<std::string> items, const Options& options, const std::string& state, bool* is_other);
  Status State(std::string* state) const;
  bool is_created() const;
  // Items of all epochs that are not done; 0 if there are none.
  int64_t Left() const;

  // Calls `taken` once, here or on another thread, with an item, or OutOfRange if there are no more. Returns a number
  // for Cancel.
  int64_t Take(const Worker& worker, Clock::time_point now, Taken taken);
  void Cancel(int64_t number);
  // Leases have expired.
  void Tick(Clock::time_point now);

 private:
  struct Holder {
    std::string task;
    int64_t incarnation = 0;
    Clock::time_point expires;
    std::deque<int64_t> positions;
    // Those that it had when its lease expired.
    std::deque<int64_t> late;
    // Clients that were told that there are no more items.
    int64_t ended = 0;
  };
  struct Waiter {
    int64_t number;
    Worker worker;
    Taken taken;
  };
  using Call = std::function<void()>;
  using Calls = std::vector<Call>;

  int64_t total() const { return static_cast<int64_t>(items_.size()) * options_.epochs; }
  // Of the epoch's order.
  const std::string& ItemAt(int64_t position);
  void Return(Holder* holder);
  // A worker that was late has not gone: it has again what nobody is done with since.
  void Reclaim(Holder* holder);
  void Expire(Clock::time_point now);
  // Its clients that wait.
  int64_t Waiting(const std::string& name) const;
  // Those of an earlier process of this worker.
  void DropWaiters(const Worker& worker, Calls* calls);
  bool OthersHold(const Worker& worker) const;
  // Whether `worker` has its answer.
  bool Answer(const Worker& worker, const Taken& taken, Clock::time_point now, Calls* calls);
  void AnswerWaiters(Clock::time_point now, Calls* calls);
  // While somebody waits, somebody must look at the leases.
  void Watch(Clock::time_point now, Calls* calls);

  mutable std::mutex mu_;
  std::vector<std::string> items_;
  Options options_;
  std::string digest_;
  // The order of the epoch that was used last.
  int64_t epoch_ = -1;
  std::vector<uint32_t> order_;
  // Positions: epoch × items + place in the epoch's order.
  int64_t next_ = 0;
  int64_t done_ = 0;
  std::set<int64_t> returned_;
  std::map<std::string, Holder> holders_;
  std::list<Waiter> waiters_;
  int64_t numbers_ = 0;
  bool is_watched_ = false;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORK_QUEUE_WORK_QUEUE_H_
