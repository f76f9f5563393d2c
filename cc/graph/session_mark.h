// How a server of starwire's marks the configuration of its sessions, which reaches every process that rewrites their
// graphs.
#ifndef STARWIRE_CC_GRAPH_SESSION_MARK_H_
#define STARWIRE_CC_GRAPH_SESSION_MARK_H_

#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

// A device type that does not exist: TensorFlow ignores it wherever the configuration goes. Its count says how graphs
// are split into calls (cc/star/switch.h).
inline constexpr char kSessionMark[] = "STARWIRE_STAR";

inline bool IsMarked(const tensorflow::ConfigProto& config) {
  return config.device_count().find(kSessionMark) != config.device_count().end();
}

}  // namespace starwire

#endif  // STARWIRE_CC_GRAPH_SESSION_MARK_H_
