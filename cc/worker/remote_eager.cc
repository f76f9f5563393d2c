#include "cc/worker/remote_eager.h"

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

// `send(request)`, or a copy of the request that the peer accepts.
template <typename Request, typename Send>
void WithPlainObjects(const Request& request, const Send& send) {
  if (!HasOpaqueObjects(request)) return send(request);
  Request copy(request);
  SpellOutObjects(&copy);
  send(copy);
}

}  // namespace

template <typename Request, typename Response>
void RemoteEager::CallEager(Method method, CallOptions* opts, const Request& request, Response* response,
                            StatusCallback done) {
  auto parse = [response](sw_bytes reply) {
    Status status = CheckWire(reply, CarrierOf(*response));
    if (!status.ok()) return status;
    if (!response->ParseFromArray(reply.data, static_cast<int>(reply.len))) return NotExpected(reply);
    status = CheckTensorsOf(*response, reply.len);
    if (!status.ok()) response->Clear();
    return status;
  };
  auto named = [target = target(), done = std::move(done)](const Status& s) { done(FromRemoteTarget(s, target)); };
  WithPlainObjects(request, [&](const Request& sent) { Call(method, sent, parse, named, opts); });
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
