// The rendezvous of one step: finds out which tensors come from other tasks and fetches those over starwire.
#ifndef STARWIRE_CC_RENDEZVOUS_REMOTE_RENDEZVOUS_H_
#define STARWIRE_CC_RENDEZVOUS_REMOTE_RENDEZVOUS_H_

#include <atomic>
#include <memory>
#include <mutex>

#include "cc/compat.h"
#include "cc/rendezvous/route.h"
#include "cc/star/client.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"

namespace starwire {

class RemoteRendezvous : public tensorflow::BaseRemoteRendezvous {
 public:
  RemoteRendezvous(const tensorflow::WorkerEnv* env, StepId step_id);

  // Goes straight to the network for tensors of other tasks. The base class would first copy the key and wrap `done`.
  void RecvAsync(const ParsedKey& key, const tensorflow::Rendezvous::Args& args, DoneCallback done) override;

  // Null before the step was set up.
  tensorflow::WorkerSession* worker_session() { return session(); }
  // What star calls of this step have left on servers; freed with the step.
  StarStep* star_step();

 protected:
  void RecvFromRemoteAsync(const tensorflow::Rendezvous::ParsedKey& key, const tensorflow::Rendezvous::Args& args,
                           DoneCallback done) override;

 private:
  ~RemoteRendezvous() override;

  const Route* FindRoute(const ParsedKey& key, const tensorflow::WorkerCacheInterface* cache) const;
  Status MakeRoute(tensorflow::WorkerSession* session, const ParsedKey& key, const Route** out);
  void Fetch(const Route* route, const ParsedKey& key, const tensorflow::Rendezvous::Args& args, DoneCallback done);

  // Grows at its head only, until the rendezvous goes: can be walked without a lock.
  std::atomic<Route*> routes_{nullptr};
  std::mutex routes_mu_;  // for adding
  std::mutex star_mu_;
  std::unique_ptr<StarStep> star_step_;  // guarded by star_mu_; stays once it is there
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_REMOTE_RENDEZVOUS_H_
