#include "cc/graph/star_switch.h"

namespace starwire {
namespace {

// A kind of device that nobody has: TensorFlow passes over it, wherever the configuration goes.
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
  (*config->mutable_device_count())[kMark] = style == StarStyle::kLite ? 2 : 1;
}

StarStyle StarStyleOf(const tensorflow::ConfigProto& config) {
  const auto found = config.device_count().find(kMark);
  if (found == config.device_count().end()) return StarStyle::kNone;
  return found->second == 2 ? StarStyle::kLite : StarStyle::kRobust;
}

}  // namespace starwire
