// Marks sessions and functions: those of servers with a star protocol have graphs that are split into calls. The server
// marks their configuration, which reaches every process that rewrites the graphs.
#ifndef STARWIRE_CC_STAR_SWITCH_H_
#define STARWIRE_CC_STAR_SWITCH_H_

#include <string>

#include "tensorflow/core/protobuf/config.pb.h"
#include "tensorflow/core/protobuf/eager_service.pb.h"

namespace starwire {

enum class StarStyle { kNone, kRobust, kLite };

// The style of a server's protocol.
StarStyle StarStyleOf(const std::string& protocol);
// "star_server" or "star_server_lite".
const char* NameOf(StarStyle style);

void MarkSession(StarStyle style, tensorflow::ConfigProto* config);
StarStyle StarStyleOf(const tensorflow::ConfigProto& config);
// Whether the configuration of a session, function or server asks for no calls: starwire.config(star=False).
bool OptsOutOfStar(const tensorflow::ConfigProto& config);

// The same for functions that an eager context is asked to run: marks them in a request that came from another task.
// Functions that they call are not marked, nor are those of sessions: nobody learns which handles they are given.
void MarkFunctions(StarStyle style, tensorflow::eager::EnqueueRequest* request);
StarStyle FunctionStyleOf(const tensorflow::ConfigProto& config);

}  // namespace starwire

#endif  // STARWIRE_CC_STAR_SWITCH_H_
