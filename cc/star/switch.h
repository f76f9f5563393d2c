// Marks the sessions whose graphs are split into calls: those of servers with a star protocol. The server marks the
// session's configuration, which reaches every process that rewrites the session's graphs.
#ifndef STARWIRE_CC_STAR_SWITCH_H_
#define STARWIRE_CC_STAR_SWITCH_H_

#include <string>

#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

enum class StarStyle { kNone, kRobust, kLite };

// The style of a server's protocol.
StarStyle StarStyleOf(const std::string& protocol);
// "star_server" or "star_server_lite".
const char* NameOf(StarStyle style);

void MarkSession(StarStyle style, tensorflow::ConfigProto* config);
StarStyle StarStyleOf(const tensorflow::ConfigProto& config);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_SWITCH_H_
