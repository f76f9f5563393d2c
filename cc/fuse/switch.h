// Whether tensors of a session are fused, and within which limits.
#ifndef STARWIRE_CC_FUSE_SWITCH_H_
#define STARWIRE_CC_FUSE_SWITCH_H_

#include <string>

#include "cc/base/compat.h"
#include "include/starwire.h"
#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

// What a session configuration says. DeepRec's ConfigProto has the field; in TensorFlow's it is an unknown one, which
// travels with the message all the same.
enum class FuseWish { kUnsaid, kOff, kOn };
// `of_server`: what the configuration of the session's server says, if that is known.
FuseWish FuseWishOf(const tensorflow::ConfigProto& config, FuseWish of_server = FuseWish::kUnsaid);

// What the configuration of the server of a task in this process says. TensorFlow merges that into the configurations
// of its sessions, where it could not be told from what they say themselves.
void SetServerFuseWish(const std::string& task, FuseWish wish);

struct FuseSettings {
  bool on = false;
  sw_fuse_limits limits = {};
};
// The session's word counts most, then the server's, then the environment's. `task` is the one that the session is
// connected to. Fails if the environment makes no sense; if fusion is off anyway, that does not matter.
Status ReadFuseSettings(const tensorflow::ConfigProto& config, const std::string& task, FuseSettings* settings);

}  // namespace starwire

#endif  // STARWIRE_CC_FUSE_SWITCH_H_
