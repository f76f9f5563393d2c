// One star call of a worker, from its feeds to its fetches. Registers the plan if the server asks for it.
#ifndef STARWIRE_CC_STAR_CLIENT_H_
#define STARWIRE_CC_STAR_CLIENT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/base/channel.h"
#include "cc/base/compat.h"
#include "cc/rendezvous/rendezvous.h"
#include "cc/star/call_codec.h"
#include "cc/star/value_codec.h"
#include "cc/worker/session_recovery.h"
#include "include/starwire.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/lib/core/refcount.h"

namespace starwire {

// The servers on which a step has left values in slots. Belongs to the step and frees the slots when the step ends.
class StarStep : public StepState {
 public:
  explicit StarStep(int64_t step_id) : step_id_(step_id) {}
  ~StarStep() override;
  void Aborted() override;
  StarStep(const StarStep&) = delete;
  StarStep& operator=(const StarStep&) = delete;

  // Before a call that keeps values: once for each Ended().
  void Keeps(const std::string& task, const std::shared_ptr<Channel>& channel, const std::string& session);
  // The server has freed the slots.
  void Freed(const std::string& task);
  // A call that keeps values is over, perhaps after the step.
  void Ended(const std::string& task);

 private:
  struct Server {
    std::shared_ptr<Channel> channel;
    std::string session;
    int calls = 0;  // on their way
  };
  using Servers = std::map<std::string, Server>;
  void Free(const Servers& servers) const;

  const int64_t step_id_;
  std::mutex mu_;
  Servers servers_;           // guarded by mu_
  bool was_aborted_ = false;  // guarded by mu_
};

// The parts of a call that are the same in every step.
struct StarCallee {
  // The operation's name, for messages.
  std::string name;
  // "/job:ps/replica:0/task:0"
  std::string task;
  std::shared_ptr<const std::string> plan;
  PlanHash hash{};
  uint64_t incarnation = 0;
  std::vector<StarKeep> keeps;
  bool last = false;
  // It neither keeps nor takes values in slots, which are lost with their connection: it may be sent again.
  bool can_repeat = false;
  // If it is only the state, it waits for a server that comes back.
  Needs needs = Needs::kMore;
  bool can_recover() const { return needs == Needs::kState; }
  // Part of a function, whose callers expect errors to name the remote target as TensorFlow's gRPC client does.
  bool of_function = false;
};

class StarClient : public tensorflow::core::RefCounted {
 public:
  struct Where {
    std::shared_ptr<Channel> channel;
    std::string session;
    int64_t step_id = 0;
    // Null if the call does not use slots.
    StarStep* step = nullptr;
    tensorflow::Allocator* allocator = nullptr;
    // May be null.
    tensorflow::CancellationManager* cancellation = nullptr;
    bool trace = false;
  };
  // An error of a call.
  static Status Named(const StarCallee& callee, const Status& status);
  // Called once, on one of TensorFlow's threads or on the thread that started the call. `stats`: a serialised StepStats
  // if the call was traced.
  using Done = std::function<void(const Status& status, std::vector<StarValue> fetches, const std::string& stats)>;

  // `callee`, and everything that `where` points at, must outlive the call of `done`.
  static void Start(const StarCallee* callee, Where where, std::vector<StarValue> feeds, Done done);

 private:
  StarClient(const StarCallee* callee, Where where, std::vector<StarValue> feeds, Done done);

  // The two requests.
  void Call();
  void Register();
  void Send(uint32_t method, const std::vector<uint8_t>& meta, const sw_payload* payload, const sw_op_vtable* vtable);
  // The status of a request that has ended.
  Status Outcome(const sw_result& result) const;
  static sw_code OnAlloc(void* op, sw_bytes meta, size_t n, const uint64_t* lens, void** bufs);
  static void OnDone(void* op, const sw_result* result);
  static void OnRegistered(void* op, const sw_result* result);
  static void DoneThrew(const Status& thrown, void* op, const sw_result* result);
  void Cancel();
  // The reply has arrived.
  void Arrived(const Status& status, bool unknown);
  // The connection was lost.
  void Repeat(const Status& lost);
  // The server was restarted, has its variables back, and does not know the session. False: that is not so.
  bool CreateSession(const Status& status);
  void Finish(const Status& status);
  Status Take(sw_bytes meta, size_t n, const uint64_t* lens, void** bufs);

  const StarCallee* const callee_;
  const Where where_;
  std::vector<StarValue> feeds_;
  Done done_;
  tensorflow::CancellationToken token_ = 0;

  StarReply reply_ = {};
  std::unique_ptr<ValueDecoder> cargo_;
  bool taken_ = false;  // OnAlloc was called: not so for a reply without payload
  Status refused_;      // its result
  bool keeps_ = false;  // the step knows that the call keeps values
  int registrations_ = 0;
  int sessions_ = 0;  // how often the session was created again
  uint32_t lane_ = 0;
  uint64_t number_ = 0;   // 0: no lane
  uint32_t attempt_ = 0;  // how often the call was sent again
  Status lost_;           // why, the first time

  std::mutex mu_;
  // All guarded by mu_. The reply, and even the next request, may come before sw_channel_call() returns.
  uint64_t request_ = 0;
  bool has_id_ = false;
  uint64_t id_ = 0;
  uint64_t ticket_ = 0;  // of the wait for a session that is created again; 0: it does not wait for one
  bool cancelled_ = false;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_CLIENT_H_
