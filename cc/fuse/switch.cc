#include "cc/fuse/switch.h"

#include <mutex>
#include <unordered_map>
#include <vector>

#include "cc/base/compat_session.h"
#include "cc/base/handles.h"
#include "cc/base/status_codec.h"
#include "google/protobuf/unknown_field_set.h"
#include "tensorflow/core/platform/logging.h"

namespace starwire {
namespace {

constexpr int kTensorFuseField = 201;

struct ServerWish {
  FuseWish wish = FuseWish::kUnsaid;
  bool functions = false;
};

struct ServerWishes {
  std::mutex mu;
  std::unordered_map<std::string, ServerWish> by_task;
};

ServerWishes* AllServerWishes() {
  static auto* wishes = new ServerWishes;
  return wishes;
}

// For a process without a server; a server logs them when it starts.
void LogEnvironmentWarnings() {
  const std::string warnings = OwnString(sw_environment_warnings()).text();
  if (!warnings.empty()) LOG(WARNING) << warnings;
}

ServerWish ServerWishOf(const std::string& task) {
  ServerWishes* wishes = AllServerWishes();
  std::lock_guard<std::mutex> lock(wishes->mu);
  const auto found = wishes->by_task.find(task);
  return found == wishes->by_task.end() ? ServerWish() : found->second;
}

}  // namespace

FuseWish FuseWishOf(const tensorflow::ConfigProto& config, FuseWish of_server) {
  std::vector<FuseWish> wishes;
  const auto& fields = config.GetReflection()->GetUnknownFields(config);
  for (int i = 0; i < fields.field_count(); ++i) {
    const auto& field = fields.field(i);
    if (field.number() != kTensorFuseField || field.type() != google::protobuf::UnknownField::TYPE_VARINT) continue;
    wishes.push_back(field.varint() != 0 ? FuseWish::kOn : FuseWish::kOff);
  }
  if (wishes.empty()) return HasTensorFuse(config) ? FuseWish::kOn : FuseWish::kUnsaid;
  // TensorFlow appends the server's configuration to the session's, and also prepends it if the session comes from
  // another process. If two wishes differ, one of them is therefore the server's.
  for (FuseWish wish : wishes) {
    if (of_server != FuseWish::kUnsaid && wish != of_server) return wish;
  }
  return wishes.size() < 3 ? wishes[0] : wishes[1];
}

void SetServerFuseWish(const std::string& task, FuseWish wish, bool functions) {
  ServerWishes* wishes = AllServerWishes();
  std::lock_guard<std::mutex> lock(wishes->mu);
  wishes->by_task[task] = {wish, functions};
}

Status ReadFuseSettings(const tensorflow::ConfigProto& config, const std::string& task, FuseScope scope, bool* on) {
  LogEnvironmentWarnings();
  const ServerWish of_server = ServerWishOf(task);
  FuseWish wish = FuseWishOf(config, of_server.wish);
  if (wish == FuseWish::kUnsaid) wish = of_server.wish;
  *on = wish == FuseWish::kOn;
  if (wish == FuseWish::kOff) return OkStatus();
  int32_t enabled = 0;
  ErrorHandle error;
  const sw_code code = sw_fuse_settings(&enabled, Into(&error));
  if (code != 0) return StatusFromError(code, error);
  if (wish != FuseWish::kUnsaid) return OkStatus();
  const bool by_protocol = scope == FuseScope::kFunction && of_server.functions;
  *on = enabled < 0 ? by_protocol : enabled != 0;
  return OkStatus();
}

}  // namespace starwire
