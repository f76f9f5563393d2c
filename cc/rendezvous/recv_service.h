// The serving side of the rendezvous: answers the requests of peers for tensors that are produced here.
#ifndef STARWIRE_CC_RENDEZVOUS_RECV_SERVICE_H_
#define STARWIRE_CC_RENDEZVOUS_RECV_SERVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cc/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/distributed_runtime/worker_env.h"

namespace starwire {

// The server forwards the handlers of sw_handlers that have to do with the rendezvous to one of these. All of them run
// on reactor threads.
//
// Lifetime: requests that are still waiting for their tensor hold the engine (through the shared pointer given to
// Start) and nothing else of the server. Detach() must be called when the server goes, after sw_engine_stop() and
// before the WorkerEnv becomes invalid.
class RecvService {
 public:
  // `env` must have its device_mgr and rendezvous_mgr by the time of the first request; the rendezvous_mgr must be
  // starwire's.
  explicit RecvService(tensorflow::WorkerEnv* env);
  ~RecvService();
  RecvService(const RecvService&) = delete;
  RecvService& operator=(const RecvService&) = delete;

  // Answers go to this engine from now on. The deleter of the pointer calls sw_engine_free(): it may run on the thread
  // that answers last.
  void Start(std::shared_ptr<sw_engine> engine);
  // No request is served any more.
  void Detach();

  void* KeyNew(sw_bytes prefix);
  void KeyFree(void* key);
  void OnRecv(const sw_recv_request* requests, size_t n);
  // The peer gave up waiting, or went: the step is aborted, as TensorFlow's own service does, so that nobody here waits
  // for it either.
  void OnCancel(sw_ticket ticket, int64_t step_id, bool peer_gone);

 private:
  class Key;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_RECV_SERVICE_H_
