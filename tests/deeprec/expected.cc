// What the detection in cc/base/compat*.h has to find in DeepRec's classes (emulate.py).
#include <type_traits>

#include "cc/base/compat_executor.h"
#include "cc/base/compat_server.h"
#include "cc/base/compat_session.h"
#include "cc/rendezvous/rendezvous.h"
#include "cc/worker/remote_worker.h"

namespace starwire {

using Args = tensorflow::Executor::Args;

static_assert(!std::is_abstract_v<RemoteWorker>);
static_assert(!std::is_abstract_v<RemoteRendezvous>);
static_assert(!std::is_copy_constructible_v<Args>);
static_assert(std::is_same_v<RemoteRendezvous::FusedDone, tensorflow::Rendezvous::FuseDoneCallback>,
              "ours overrides its method");

bool Fuses(const tensorflow::ConfigProto& config) { return HasTensorFuse(config) == config.tensor_fuse(); }

}  // namespace starwire
