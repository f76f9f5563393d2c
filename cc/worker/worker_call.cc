#include "cc/worker/worker_call.h"

namespace starwire {

using tensorflow::CallOptions;
using tensorflow::StatusCallback;
using tensorflow::protobuf::MessageLite;

Status Unexpected(sw_bytes reply) {
  return MakeStatus(kInternal,
                    "the reply is not the expected protocol buffer (" + std::to_string(reply.len) + " bytes)");
}

namespace {

// As often as a star call.
constexpr int kMaxAttempts = 10;

// `lost`: how the first connection was lost.
void Attempt(const std::shared_ptr<const RepeatableCall>& call, int attempts, const Status& lost) {
  StatusCallback done = [call, lost](const Status& status) {
    // That there is no new connection says less than how the last one was lost.
    call->done(StatusNumber(status) == kUnavailable && !lost.ok() ? lost : status);
  };
  CallOptions* opts = call->cancellation == nullptr ? nullptr : call->cancellation->current();
  auto* attempt = new OneCall(call->channel, call->target, call->parse, std::move(done), opts);
  if (attempts > 1) {
    attempt->IfLost([call, attempts, lost](const Status& now) { Attempt(call, attempts - 1, lost.ok() ? now : lost); });
  }
  Guard(
      "sending a request", [&] { attempt->Start(call->method, *call->request, call->flags); },
      [&](const Status& thrown) { attempt->Fail(thrown); });
  if (call->cancellation != nullptr) call->cancellation->Started();
}

}  // namespace

void CallRepeatedly(RepeatableCall call) {
  Attempt(std::make_shared<const RepeatableCall>(std::move(call)), kMaxAttempts, OkStatus());
}

void CallTask(const std::shared_ptr<Channel>& channel, const std::string& task, Method method,
              std::shared_ptr<const MessageLite> request, StatusCallback done) {
  const ReplyParser parse = [](sw_bytes) { return OkStatus(); };
  CallRepeatedly({channel, task, method, std::move(request), parse, std::move(done), kWaitToConnect});
}

}  // namespace starwire
