// The serving side of the rendezvous: answers peers' requests for tensors that are produced here.
#ifndef STARWIRE_CC_RENDEZVOUS_RECV_SERVICE_H_
#define STARWIRE_CC_RENDEZVOUS_RECV_SERVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "cc/base/background_queue.h"
#include "cc/base/compat.h"
#include "cc/base/log_budget.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"

namespace starwire {

// The engine forwards the rendezvous handlers of sw_handlers to this object, all on reactor threads. Requests that wait
// for their tensor keep the engine alive, but refer to nothing in this object.
class RecvService {
 public:
  // `env` must have its device_mgr and rendezvous_mgr by the time of the first request; the rendezvous_mgr must be a
  // starwire::RendezvousMgr. `env` must outlive the engine's stop.
  explicit RecvService(tensorflow::WorkerEnv* env);
  ~RecvService();
  RecvService(const RecvService&) = delete;
  RecvService& operator=(const RecvService&) = delete;

  // Answers go to this engine, which is not kept alive. Call it before any handler.
  void Start(const std::shared_ptr<sw_engine>& engine, std::shared_ptr<ServerQueues> queues);

  // The handlers of sw_handlers.
  void* KeyNew(sw_bytes prefix);
  void KeyFree(void* key);
  void OnRecv(const sw_recv_request* requests, size_t n);
  // The peer gave up waiting, or disconnected: aborts the step, as TensorFlow's own service does, so that nothing here
  // waits for it either.
  void OnCancel(sw_ticket ticket, int64_t step_id, bool peer_gone);

 private:
  class Key;
  class Step;
  // Steps whose abort is due. Outlives the service: aborts run on a timer.
  struct Aborts {
    std::mutex mu;
    std::unordered_set<int64_t> due;
  };

  void Serve(const sw_recv_request& request, const std::shared_ptr<sw_engine>& engine, Step* step);

  tensorflow::WorkerEnv* const env_;
  std::weak_ptr<sw_engine> engine_;
  std::shared_ptr<ServerQueues> queues_;
  const std::shared_ptr<Aborts> aborts_;
  LogBudget abort_lines_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_RECV_SERVICE_H_
