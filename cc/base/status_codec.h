// A TensorFlow status on the wire: code and message travel in the reply, attached payloads (the "derived error" mark,
// pre-emption notices and so on) as error details.
#ifndef STARWIRE_CC_BASE_STATUS_CODEC_H_
#define STARWIRE_CC_BASE_STATUS_CODEC_H_

#include <string>

#include "cc/base/compat.h"
#include "cc/base/handles.h"
#include "include/starwire.h"

namespace starwire {

// Details of an error: for each payload u32 length + type URL, u32 length + bytes, little endian. Empty if there are
// none.
std::string EncodeErrorDetails(const Status& status);
// Attaches the payloads that EncodeErrorDetails() encoded. Truncated details are dropped without an error: they come
// from the network and are optional.
void DecodeErrorDetails(sw_bytes details, Status* status);

// The error of a C ABI function.
Status StatusFromError(sw_code code, const ErrorHandle& error);
// The outcome of a call. Errors raised by the transport itself name `target`.
Status StatusFromResult(const sw_result& result, const std::string& target);
// The same error, with the sentence that TensorFlow's gRPC client adds to every error of a call to `target`, from the
// task itself or on the way to it.
Status FromRemoteTarget(const Status& status, const std::string& target);
// What became of something after it was cancelled: a Cancelled or Aborted error is a consequence of that, and is marked
// as derived, so that TensorFlow reports the error that led to the cancellation instead.
Status AfterCancellation(const Status& status);
// Answers a request with an error (or, if `status` is OK, with an empty reply).
void ReplyError(sw_engine* engine, sw_ticket ticket, const Status& status);

inline sw_bytes AsBytes(const std::string& s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }
inline std::string AsString(sw_bytes b) {
  return b.len == 0 ? std::string() : std::string(reinterpret_cast<const char*>(b.data), b.len);
}

}  // namespace starwire

#endif  // STARWIRE_CC_BASE_STATUS_CODEC_H_
