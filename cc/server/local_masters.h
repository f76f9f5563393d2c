// In-process clients find a master by its target ("grpc://host:port") in a table of TensorFlow's whose entries are
// never removed or replaced. To give a server that is created again at the same address its sessions, masters work on
// an environment that is kept here.
#ifndef STARWIRE_CC_SERVER_LOCAL_MASTERS_H_
#define STARWIRE_CC_SERVER_LOCAL_MASTERS_H_

#include <string>

#include "tensorflow/core/distributed_runtime/master_env.h"

namespace starwire {

// From now on TensorFlow's master for `target`, whichever server created it, works on a copy of `env`; the entry is
// added if this is the first server at `target`. `own` is the environment that this server's master was constructed
// with; it must never be freed.
void PointLocalMasterAt(const std::string& target, tensorflow::MasterEnv* own, const tensorflow::MasterEnv& env);

// The server of `own` has stopped: sessions created in its master from now on fail with Unavailable instead of using
// freed objects.
void CloseMaster(const std::string& target, tensorflow::MasterEnv* own);

}  // namespace starwire

#endif  // STARWIRE_CC_SERVER_LOCAL_MASTERS_H_
