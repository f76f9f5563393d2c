// Serves the worker methods that peers call over the data port, as TensorFlow's gRPC worker service does over its port.
#ifndef STARWIRE_CC_WORKER_WORKER_SERVICE_H_
#define STARWIRE_CC_WORKER_WORKER_SERVICE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cc/base/background_queue.h"
#include "cc/base/compat.h"
#include "cc/base/log_budget.h"
#include "cc/worker/peer_sessions.h"
#include "cc/worker/worker.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/eager/eager_service_impl.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"

namespace starwire {

class WorkerService : public std::enable_shared_from_this<WorkerService> {
 public:
  // Both must outlive Shutdown().
  WorkerService(StarwireWorker* worker, tensorflow::WorkerEnv* env);
  ~WorkerService();
  WorkerService(const WorkerService&) = delete;
  WorkerService& operator=(const WorkerService&) = delete;

  // The implementation of TensorFlow's eager service on the gRPC port, which has the contexts; must outlive Shutdown().
  // Without it, the server does not have the methods. `prepare` is called for each Enqueue that arrived. Call it before
  // Start().
  using Prepare = std::function<void(tensorflow::eager::EnqueueRequest* request)>;
  void SetEager(tensorflow::eager::EagerServiceImpl* eager, Prepare prepare) {
    eager_ = eager;
    prepare_ = std::move(prepare);
  }

  // Answers go to this engine.
  void Start(std::shared_ptr<sw_engine> engine, std::shared_ptr<ServerQueues> queues);

  // The handlers of sw_handlers; reactor threads.
  void OnCall(const sw_call_request* request);
  // The caller gave up or disconnected: cancels the method, as TensorFlow's service does.
  void OnCancel(sw_ticket ticket);
  void OnPeerCame(uint64_t conn, sw_bytes task, uint64_t incarnation);
  void OnPeerGone(uint64_t conn);

  // Cancels calls in progress and waits for them, at most `timeout_ms`. Call it after the engine has stopped. False if
  // a call is still running.
  bool Shutdown(int64_t timeout_ms);

 private:
  struct ServedCall;
  template <typename Request, typename Response>
  struct TypedCall;
  // Where a method runs.
  enum class Place {
    kReactor,     // at once on the reactor: short and never blocking
    kPool,        // on TensorFlow's compute pool
    kBackground,  // on the thread for slow queues: waits for work on the compute pool
    kThread,      // on a thread of its own: may wait for anything
  };
  static constexpr size_t kShards = 16;
  struct TicketHash {
    size_t operator()(sw_ticket t) const {
      return (t.id * 0x9E3779B97F4A7C15ull ^ t.conn * 0xC2B2AE3D27D4EB4Full) >> 20;
    }
  };
  struct SameTicket {
    bool operator()(sw_ticket a, sw_ticket b) const { return a.conn == b.conn && a.id == b.id; }
  };
  struct Shard {
    std::mutex mu;
    std::unordered_map<sw_ticket, std::shared_ptr<ServedCall>, TicketHash, SameTicket> calls;
  };

  template <typename Request, typename Response, typename Run>
  void Serve(const sw_call_request* request, Place place, Run run);
  // With a method of the worker that needs nothing else.
  template <typename Class, typename Request, typename Response>
  void Serve(const sw_call_request* request, Place place,
             void (Class::*method)(tensorflow::CallOptions*, Request*, Response*, tensorflow::StatusCallback));
  template <typename Class, typename Request, typename Response>
  void Serve(const sw_call_request* request, Place place,
             void (Class::*method)(Request*, Response*, tensorflow::StatusCallback));
  // False: this server has no eager service.
  bool ServeEager(const sw_call_request* request);
  Shard& ShardOf(sw_ticket ticket);
  void Finish(const std::shared_ptr<ServedCall>& call, const Status& status);
  void Cancel(const std::shared_ptr<ServedCall>& call);
  // Releases state that nothing can use any more.
  void Drop(const std::string& task, bool is_back, PeerSessions::Registered registered);

  StarwireWorker* const worker_;
  tensorflow::WorkerEnv* const env_;
  tensorflow::eager::EagerServiceImpl* eager_ = nullptr;
  Prepare prepare_;
  std::shared_ptr<sw_engine> engine_;
  std::shared_ptr<ServerQueues> queues_;
  std::atomic<int64_t> running_{0};
  LogBudget release_lines_;
  std::array<Shard, kShards> shards_;
  PeerSessions peer_sessions_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_WORKER_WORKER_SERVICE_H_
