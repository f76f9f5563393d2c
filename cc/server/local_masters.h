// In-process clients reach a master by its target ("grpc://host:port") through a table of TensorFlow's that never
// forgets an entry and never replaces one. So that a server which is created again at the same address gets its
// sessions, masters work on an environment that is kept here.
#ifndef STARWIRE_CC_SERVER_LOCAL_MASTERS_H_
#define STARWIRE_CC_SERVER_LOCAL_MASTERS_H_

#include <string>

#include "tensorflow/core/distributed_runtime/master_env.h"

namespace starwire {

// From now on the master that TensorFlow has for `target`, whichever server it came with, works on a copy of `env`; the
// entry is made if this is the first server there. `own` is the environment that this server's master was constructed
// with; it must never be freed.
void PointLocalMasterAt(const std::string& target, tensorflow::MasterEnv* own, const tensorflow::MasterEnv& env);

// The server of `own` ended: sessions that are created in its master from now on fail with Unavailable instead of using
// what is gone.
void CloseMaster(const std::string& target, tensorflow::MasterEnv* own);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_LOCAL_MASTERS_H_
