#include "cc/worker/remote_eager.h"

#include <optional>
#include <utility>

#include "cc/base/status_codec.h"
#include "cc/tensor/objects.h"
#include "cc/worker/eager_messages.h"

namespace starwire {

using tensorflow::CallOptions;
using tensorflow::StatusCallback;
using tensorflow::eager::EnqueueRequest;
using tensorflow::eager::EnqueueResponse;
using tensorflow::eager::RunComponentFunctionRequest;
using tensorflow::eager::RunComponentFunctionResponse;

namespace {

TensorCarrier CarrierOf(const EnqueueResponse&) { return TensorCarrier::kEnqueueResponse; }
TensorCarrier CarrierOf(const RunComponentFunctionResponse&) { return TensorCarrier::kRunComponentFunctionResponse; }

}  // namespace

template <typename Request, typename Response>
void RemoteEager::CallEager(Method method, CallOptions* opts, const Request& request, Response* response,
                            StatusCallback done) {
  // What the peer accepts, if that is a copy.
  std::optional<Request> copy;
  if (HasOpaqueObjects(request)) {
    copy = request;
    if (Status status = SpellOutObjects(&*copy); !status.ok()) return done(status);
  }
  auto parse = [response](sw_bytes reply) {
    Status status = CheckWire(reply, CarrierOf(*response));
    if (!status.ok()) return status;
    if (!response->ParseFromArray(reply.data, static_cast<int>(reply.len))) return NotExpected(reply);
    status = CheckTensorsOf(*response, reply.len);
    if (!status.ok()) response->Clear();
    return status;
  };
  auto named = [target = target(), done = std::move(done)](const Status& s) { done(FromRemoteTarget(s, target)); };
  Call(method, copy.has_value() ? *copy : request, parse, named, opts);
}

void RemoteEager::EagerEnqueueAsync(CallOptions* opts, const EnqueueRequest* request, EnqueueResponse* response,
                                    StatusCallback done) {
  CallEager(Method::kEagerEnqueue, opts, *request, response, std::move(done));
}

void RemoteEager::EagerRunComponentFunctionAsync(CallOptions* opts, const RunComponentFunctionRequest* request,
                                                 RunComponentFunctionResponse* response, StatusCallback done) {
  CallEager(Method::kEagerRunComponentFunction, opts, *request, response, std::move(done));
}

}  // namespace starwire
