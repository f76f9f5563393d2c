// Which sessions have their graphs split into calls: those of servers of a star protocol. The server says so in the
// session's configuration, which goes where the session's graphs are made.
#ifndef STARWIRE_CC_STAR_SWITCH_H_
#define STARWIRE_CC_STAR_SWITCH_H_

#include <string>

#include "tensorflow/core/protobuf/config.pb.h"

namespace starwire {

enum class StarStyle { kNone, kRobust, kLite };

// Of a server's protocol.
StarStyle StarStyleOf(const std::string& protocol);
// "star_server" or "star_server_lite".
const char* NameOf(StarStyle style);

void MarkSession(StarStyle style, tensorflow::ConfigProto* config);
StarStyle StarStyleOf(const tensorflow::ConfigProto& config);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_SWITCH_H_
