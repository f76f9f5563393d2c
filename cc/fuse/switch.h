// Whether tensors of a session or function are fused.
#ifndef STARWIRE_CC_FUSE_SWITCH_H_
#define STARWIRE_CC_FUSE_SWITCH_H_

#include <string>

#include "cc/base/compat.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

// The setting in the configuration of a session or function. DeepRec's ConfigProto has the field; in TensorFlow's it is
// an unknown field, which still travels with the message.
enum class FuseWish { kUnsaid, kOff, kOn };
// `of_server`: the setting of the session's server, if known.
FuseWish FuseWishOf(const tensorflow::ConfigProto& config, FuseWish of_server = FuseWish::kUnsaid);

// Records the setting of the server of a task in this process. TensorFlow merges it into the configurations of the
// server's sessions, where it cannot be told from their own. `functions`: the server's protocol fuses tensors of
// functions unless told otherwise.
void SetServerFuseWish(const std::string& task, FuseWish wish, bool functions);

// The graph of a session, or of a function that runs on several tasks.
enum class FuseScope { kSession, kFunction };
// In order of precedence: the session or function, its server, the environment, the protocol. `task` is the one that
// the session is connected to, or that calls the function. Fails if the environment is invalid, unless fusion is off
// anyway.
Status ReadFuseSettings(const tensorflow::ConfigProto& config, const std::string& task, FuseScope scope, bool* on);

}  // namespace starwire

#endif  // STARWIRE_CC_FUSE_SWITCH_H_
