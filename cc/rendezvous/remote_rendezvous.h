// The rendezvous of one step: finds out which tensors come from other tasks and fetches those over starwire.
#ifndef STARWIRE_CC_RENDEZVOUS_REMOTE_RENDEZVOUS_H_
#define STARWIRE_CC_RENDEZVOUS_REMOTE_RENDEZVOUS_H_

#include <atomic>
#include <mutex>

#include "cc/compat.h"
#include "cc/rendezvous/route.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"

namespace starwire {

class RemoteRendezvous : public tensorflow::BaseRemoteRendezvous {
 public:
  RemoteRendezvous(const tensorflow::WorkerEnv* env, StepId step_id);

  // Goes straight to the network for tensors of other tasks. The base class would first copy the key and wrap `done`.
  void RecvAsync(const ParsedKey& key, const tensorflow::Rendezvous::Args& args, DoneCallback done) override;

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
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_REMOTE_RENDEZVOUS_H_
