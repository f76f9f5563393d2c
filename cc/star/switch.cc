#include "cc/star/switch.h"

#include "cc/base/compat.h"

namespace starwire {
namespace {

// A device type that does not exist: TensorFlow ignores it wherever the configuration goes. 0: the session opted out of
// calls (python/starwire/_config.py).
constexpr char kMark[] = "STARWIRE_STAR";
// Functions that run in a marked session may inherit its configuration.
constexpr char kFunctionMark[] = "STARWIRE_STAR_FUNCTION";
constexpr char kConfigAttr[] = "config_proto";

StarStyle StyleOf(const tensorflow::ConfigProto& config, const char* mark) {
  const auto found = config.device_count().find(mark);
  if (found == config.device_count().end() || found->second == 0) return StarStyle::kNone;
  return found->second == 2 ? StarStyle::kLite : StarStyle::kRobust;
}

}  // namespace

StarStyle StarStyleOf(const std::string& protocol) {
  if (protocol == NameOf(StarStyle::kRobust)) return StarStyle::kRobust;
  if (protocol == NameOf(StarStyle::kLite)) return StarStyle::kLite;
  return StarStyle::kNone;
}

const char* NameOf(StarStyle style) { return style == StarStyle::kLite ? "star_server_lite" : "star_server"; }

void MarkSession(StarStyle style, tensorflow::ConfigProto* config) {
  if (style == StarStyle::kNone) return;
  // The session may have opted out.
  config->mutable_device_count()->insert({kMark, style == StarStyle::kLite ? 2 : 1});
}

StarStyle StarStyleOf(const tensorflow::ConfigProto& config) { return StyleOf(config, kMark); }

bool OptsOutOfStar(const tensorflow::ConfigProto& config) {
  const auto found = config.device_count().find(kMark);
  return found != config.device_count().end() && found->second == 0;
}

#if STARWIRE_EAGER_PORT
void MarkFunctions(StarStyle style, tensorflow::eager::EnqueueRequest* request) {
  if (style == StarStyle::kNone) return;
  tensorflow::ConfigProto mark;
  (*mark.mutable_device_count())[kFunctionMark] = style == StarStyle::kLite ? 2 : 1;
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
