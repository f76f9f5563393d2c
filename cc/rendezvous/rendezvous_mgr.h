// The receiving side of the rendezvous: fetches tensors that other tasks produce over starwire.
#ifndef STARWIRE_CC_RENDEZVOUS_RENDEZVOUS_MGR_H_
#define STARWIRE_CC_RENDEZVOUS_RENDEZVOUS_MGR_H_

#include "cc/base/compat.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"

namespace starwire {

// Give it to GrpcServerOptions::rendezvous_mgr_func. Sources whose worker is not a RemoteWorker are refused with
// FailedPrecondition.
class RendezvousMgr : public tensorflow::BaseRendezvousMgr {
 public:
  explicit RendezvousMgr(const tensorflow::WorkerEnv* env);

  void RecvLocalAsync(StepId step_id, const tensorflow::Rendezvous::ParsedKey& key,
                      tensorflow::Rendezvous::DoneCallback done) override;
  void Cleanup(StepId step_id) override;

 protected:
  CreatedRendezvous Create(StepId step_id, const tensorflow::WorkerEnv* env) override;
};

}  // namespace starwire

#endif  // STARWIRE_CC_RENDEZVOUS_RENDEZVOUS_MGR_H_
