// The parameter server's side of star calls: registers plans, runs them, keeps values between the calls of a step.
//
// Plans are compiled once for all sessions that share the server's devices, and once per session where their kernels
// have a state of their own or the session has devices of its own. What is kept, and for how long, is decided by the
// tables behind sw_star_tables (crates/engine/src/star/). A plan that was seen to be cheap runs on the reactor that its
// call came in on, any other on TensorFlow's pool.
#ifndef STARWIRE_CC_STAR_SERVICE_H_
#define STARWIRE_CC_STAR_SERVICE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc/base/compat.h"
#include "cc/base/errands.h"
#include "cc/base/handles.h"
#include "cc/star/plan.h"
#include "cc/star/wire.h"
#include "cc/worker/hooks.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace starwire {

class StarRun;  // cc/star/run.h

class StarService : public SessionObserver, public std::enable_shared_from_this<StarService> {
 public:
  // `env` outlives Shutdown().
  explicit StarService(tensorflow::WorkerEnv* env);
  ~StarService() override;
  StarService(const StarService&) = delete;
  StarService& operator=(const StarService&) = delete;

  // Answers go to this engine; `task` is for messages. Before any of the handlers.
  Status Start(std::shared_ptr<sw_engine> engine, const std::string& task, std::shared_ptr<ServerErrands> errands);

  // Of sw_handlers; reactor threads. Methods kStarCall, kStarRegister and kStarEnd.
  void OnCall(const sw_call_request* request);
  void OnCancel(sw_ticket ticket);
  void OnPeerCame(uint64_t conn, sw_bytes task, uint64_t incarnation);
  void OnPeerGone(uint64_t conn);

  void SessionClosed(const std::string& handle) override;
  void AllCleanedUp() override;

  // Cancels what is being served and waits for it and for the plans, at most `timeout_ms`. To be called after the
  // engine was stopped. False: something still runs.
  bool Shutdown(int64_t timeout_ms);

 private:
  friend class StarRun;
  struct Registration;
  static constexpr size_t kShards = 16;
  struct TicketHash {
    size_t operator()(sw_ticket t) const {
      return (t.id * 0x9E3779B97F4A7C15ull ^ t.conn * 0xC2B2AE3D27D4EB4Full) >> 20;
    }
  };
  struct SameTicket {
    bool operator()(sw_ticket a, sw_ticket b) const { return a.conn == b.conn && a.id == b.id; }
  };
  // Runs that can be cancelled.
  struct Shard {
    std::mutex mu;
    std::unordered_map<sw_ticket, std::shared_ptr<StarRun>, TicketHash, SameTicket> runs;
  };

  void OnStarCall(const sw_call_request* request);
  void Serve(const std::shared_ptr<StarRun>& run, bool on_reactor);
  void TakeAndLaunch(const std::shared_ptr<StarRun>& run, bool on_reactor);
  // A plan that this session has not used before: on the pool.
  void FindPlan(const std::shared_ptr<StarRun>& run);
  void Launch(const std::shared_ptr<StarRun>& run, StarPlan* plan, bool on_reactor);
  // From here on it can be cancelled.
  void Remember(const std::shared_ptr<StarRun>& run);
  // The run is over, and answered.
  void Forget(sw_ticket ticket);

  void OnRegister(const sw_call_request* request);
  void Register(const std::shared_ptr<Registration>& registration);
  Status CompilePlan(const Registration& registration, std::shared_ptr<tensorflow::WorkerSession> session,
                     bool isolated);
  static void Waited(void* service, void* waiter);
  void OnEnd(const sw_call_request* request);

  Status CheckIncarnation(uint64_t expected) const;
  // With the name of the task at the other end.
  Status Named(const Status& status, uint64_t conn);
  Status FindSession(const std::string& handle, std::shared_ptr<tensorflow::WorkerSession>* session, bool* isolated);
  Shard& ShardOf(sw_ticket ticket) { return shards_[TicketHash()(ticket) % kShards]; }
  // The service's life goes on until `work` has run.
  template <typename Work>
  void Schedule(Work work);

  tensorflow::WorkerEnv* const env_;
  std::shared_ptr<sw_engine> engine_;
  std::string task_;
  StarTablesHandle tables_;
  std::shared_ptr<ServerErrands> errands_;
  std::mutex peers_mu_;
  std::unordered_map<uint64_t, std::string> peers_;  // by connection
  uint64_t inline_ns_ = 0;
  std::vector<uint64_t> incarnations_;
  StarPlan::Census plans_alive_ = std::make_shared<std::atomic<int64_t>>(0);
  // Calls and registrations.
  std::atomic<int64_t> running_{0};
  std::atomic<int64_t> containers_{0};
  // For plans whose kernels put nothing into one.
  tensorflow::ScopedStepContainer no_container_{0, [](const std::string&) {}, "starwire_none"};
  std::array<Shard, kShards> shards_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_SERVICE_H_
