#include "cc/star/switch.h"

#include "cc/base/compat.h"
#include "cc/graph/session_mark.h"

namespace starwire {
namespace {

// The numbers of a mark are 0 for a session that opted out of calls (python/starwire/_config.py), 1 and 2 for the
// styles, and 3 for a protocol without calls. Functions that run in a marked session may inherit its configuration.
constexpr char kFunctionMark[] = "STARWIRE_STAR_FUNCTION";
constexpr char kConfigAttr[] = "config_proto";

StarStyle StyleOf(const tensorflow::ConfigProto& config, const char* mark) {
  const auto found = config.device_count().find(mark);
  const int number = found == config.device_count().end() ? 0 : found->second;
  return number == 1 ? StarStyle::kRobust : number == 2 ? StarStyle::kLite : StarStyle::kNone;
}

int NumberOf(StarStyle style) { return style == StarStyle::kLite ? 2 : style == StarStyle::kRobust ? 1 : 3; }

}  // namespace

StarStyle StarStyleOf(const std::string& protocol) {
  if (protocol == NameOf(StarStyle::kRobust)) return StarStyle::kRobust;
  if (protocol == NameOf(StarStyle::kLite)) return StarStyle::kLite;
  return StarStyle::kNone;
}

const char* NameOf(StarStyle style) { return style == StarStyle::kLite ? "star_server_lite" : "star_server"; }

void MarkSession(StarStyle style, tensorflow::ConfigProto* config) {
  // The session may have opted out.
  config->mutable_device_count()->insert({kSessionMark, NumberOf(style)});
}

StarStyle StarStyleOf(const tensorflow::ConfigProto& config) { return StyleOf(config, kSessionMark); }

bool OptsOutOfStar(const tensorflow::ConfigProto& config) {
  const auto found = config.device_count().find(kSessionMark);
  return found != config.device_count().end() && found->second == 0;
}

#if STARWIRE_EAGER_PORT
void MarkFunctions(StarStyle style, tensorflow::eager::EnqueueRequest* request) {
  if (style == StarStyle::kNone) return;
  tensorflow::ConfigProto mark;
  (*mark.mutable_device_count())[kFunctionMark] = NumberOf(style);
  for (tensorflow::eager::QueueItem& item : *request->mutable_queue()) {
    if (!item.has_operation() || !item.operation().is_function() || item.operation().is_component_function()) continue;
    const auto config = item.mutable_operation()->mutable_attrs()->find(kConfigAttr);
    // Serialised messages are merged by writing one after the other.
    if (config != item.mutable_operation()->mutable_attrs()->end()) mark.AppendToString(config->second.mutable_s());
  }
}

#endif

StarStyle FunctionStyleOf(const tensorflow::ConfigProto& config) {
  return OptsOutOfStar(config) ? StarStyle::kNone : StyleOf(config, kFunctionMark);
}

}  // namespace starwire
