#include "cc/rendezvous/rendezvous_mgr.h"

#include <utility>

#include "cc/rendezvous/remote_rendezvous.h"

namespace starwire {

RendezvousMgr::RendezvousMgr(const tensorflow::WorkerEnv* env) : BaseRendezvousMgr(env) {}

void RendezvousMgr::RecvLocalAsync(StepId step_id, const tensorflow::Rendezvous::ParsedKey& key,
                                   tensorflow::Rendezvous::DoneCallback done) {
  tensorflow::RemoteRendezvous* rendezvous = TakeReference(Find(step_id));
  static_cast<RemoteRendezvous*>(rendezvous)->ServeAsync(key, std::move(done));
  rendezvous->Unref();
}

void RendezvousMgr::Cleanup(StepId step_id) {
  RemoteRendezvous::CleanUp here(step_id);
  BaseRendezvousMgr::Cleanup(step_id);
}

CreatedRendezvous RendezvousMgr::Create(StepId step_id, const tensorflow::WorkerEnv* env) {
  return CreatedRendezvous(new RemoteRendezvous(env, step_id));
}

}  // namespace starwire
