#include "cc/rendezvous/rendezvous_mgr.h"

#include "cc/rendezvous/remote_rendezvous.h"

namespace starwire {

RendezvousMgr::RendezvousMgr(const tensorflow::WorkerEnv* env) : BaseRendezvousMgr(env) {}

CreatedRendezvous RendezvousMgr::Create(StepId step_id, const tensorflow::WorkerEnv* env) {
  return CreatedRendezvous(new RemoteRendezvous(env, step_id));
}

}  // namespace starwire
