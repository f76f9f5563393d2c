#include "cc/star/switch.h"

namespace starwire {
namespace {

// A device type that does not exist: TensorFlow ignores it wherever the configuration goes. 0: the session opted out of
// calls (python/starwire/_config.py).
constexpr char kMark[] = "STARWIRE_STAR";

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

StarStyle StarStyleOf(const tensorflow::ConfigProto& config) {
  const auto found = config.device_count().find(kMark);
  if (found == config.device_count().end()) return StarStyle::kNone;
  if (found->second == 0) return StarStyle::kNone;
  return found->second == 2 ? StarStyle::kLite : StarStyle::kRobust;
}

}  // namespace starwire
