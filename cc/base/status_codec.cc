#include "cc/base/status_codec.h"

#include <cstring>
#include <limits>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "cc/base/guard.h"

namespace starwire {
namespace {

void AppendField(absl::string_view field, std::string* out) {
  const uint32_t len = static_cast<uint32_t>(field.size());
  for (int shift = 0; shift < 32; shift += 8) out->push_back(static_cast<char>(len >> shift));
  out->append(field.data(), field.size());
}

bool TakeField(sw_bytes* in, absl::string_view* field) {
  if (in->len < 4) return false;
  uint32_t len = 0;
  for (int i = 0; i < 4; ++i) len |= static_cast<uint32_t>(in->data[i]) << (8 * i);
  if (in->len - 4 < len) return false;
  *field = absl::string_view(reinterpret_cast<const char*>(in->data + 4), len);
  in->data += 4 + static_cast<size_t>(len);
  in->len -= 4 + static_cast<size_t>(len);
  return true;
}

// TensorFlow's ClusterCoordinator looks for this sentence of the gRPC client to tell a dead parameter server from a
// dead worker.
std::string RemoteTarget(const std::string& target) {
  return "\nAdditional GRPC error information from remote target " + target;
}

}  // namespace

std::string EncodeErrorDetails(const Status& status) {
  std::string out;
  if (status.ok()) return out;
  ForEachPayload(status, [&out](absl::string_view url, const auto& value) {
    const std::string bytes(value);
    if (url.size() > std::numeric_limits<uint32_t>::max() || bytes.size() > std::numeric_limits<uint32_t>::max()) {
      return;
    }
    AppendField(url, &out);
    AppendField(bytes, &out);
  });
  return out;
}

void DecodeErrorDetails(sw_bytes details, Status* status) {
  if (status->ok()) return;
  absl::string_view url, value;
  while (TakeField(&details, &url) && TakeField(&details, &value)) {
    SetStatusPayload(status, url, value);
  }
}

Status StatusFromError(sw_code code, const ErrorHandle& error) {
  return MakeStatus(code, error == nullptr ? "the transport gave no reason" : AsString(sw_error_message(error.get())));
}

Status StatusFromResult(const sw_result& result, const std::string& target) {
  if (result.code == 0) return OkStatus();
  std::string message = AsString(result.message);
  if (result.from_peer == 0 && message.find(target) == std::string::npos) {
    message += " (call to " + target + ")";
  }
  if (result.from_peer == 0) message += RemoteTarget(target) + ": none";
  Status status = MakeStatus(result.code, message);
  if (result.from_peer != 0) DecodeErrorDetails(result.meta, &status);
  return status;
}

Status FromRemoteTarget(const Status& status, const std::string& target) {
  if (status.ok()) return status;
  const std::string message = StatusMessage(status), sentence = RemoteTarget(target);
  if (message.find(sentence) != std::string::npos) return status;
  return WithMessage(status, message + sentence + ": none");
}

Status AfterCancellation(const Status& status) {
  const bool follows = StatusNumber(status) == kCancelled || StatusNumber(status) == kAborted;
  return follows ? tensorflow::StatusGroup::MakeDerived(status) : status;
}

void ReplyError(sw_engine* engine, sw_ticket ticket, const Status& status) {
  const std::string message = StatusMessage(status);
  auto* details = new std::string(EncodeErrorDetails(status));
  if (details->empty()) {
    delete details;
    sw_engine_reply(engine, ticket, StatusNumber(status), AsBytes(message), nullptr);
    return;
  }
  const sw_part part = {details->data(), details->size()};
  const sw_payload payload = {&part, 1, details, Guarded<&DeleteOwner<std::string>>};
  sw_engine_reply(engine, ticket, StatusNumber(status), AsBytes(message), &payload);
}

}  // namespace starwire
